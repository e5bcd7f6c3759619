from collections.abc import Iterator

import pytest

from tests.engine.server.dry_server import DryServer, free_port


@pytest.fixture(scope="session")
def events_ports() -> tuple[int, int]:
    return free_port(), free_port()


@pytest.fixture(scope="session")
def server(events_ports: tuple[int, int]) -> Iterator[DryServer]:
    """One server for all tests that leave it as it was."""
    events, replay = map(str, events_ports)
    flags = ("--events-port", events, "--replay-port", replay, "--max-body-size", "200KB", "--max-model-len", "4096")
    with DryServer(*flags, "--served-model-name", "dry", "other-name", "--dry-run-step-ms", "1") as server:
        yield server
