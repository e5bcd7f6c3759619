from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.engine.server.dry_server import DryServer, free_port


@pytest.fixture(scope="session", autouse=True)
def _engines_go_by_their_reference_counts() -> Iterator[None]:
    """An `LLM` has Python look through all that there is when it is made, and again when it is gone.

    Tests make hundreds of them among all that pytest has collected, which takes 0.3 s of a core each time.
    """
    with pytest.MonkeyPatch.context() as patch:
        nothing = SimpleNamespace(collect=int, freeze=int, unfreeze=int)
        patch.setattr("mini_infer_engine.offline.loaded_model.gc", nothing)
        yield


@pytest.fixture(scope="session", autouse=True)
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What engines keep of models, such as calibrated weights, is gone with the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


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
