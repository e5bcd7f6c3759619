"""One server of the demo model for the files that leave it as they find it; they share a worker (tests/conftest.py)."""

from collections.abc import Iterator

import pytest

from tests.engine.server.dry_server import EngineServer

CONTEXT_TOKENS = 512
DEMO = ("--model", "demo", "--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "64MB")


@pytest.fixture(scope="session")
def demo() -> Iterator[EngineServer]:
    with EngineServer(*DEMO, "--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", "8") as server:
        yield server
