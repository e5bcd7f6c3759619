"""Which tests run in one worker of `make test`, and in which order: those of a file together, what takes long first.

So a worker makes a file's fixtures once, and one Kubernetes control plane for all files that need one and are its own.
Those wait most of the time: two workers do, and others compute meanwhile.
"""

import gc
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.setup_errors import SetupErrors
from tests.support.turns import COSTS, cpu_seconds, left_out, read_costs

ROOT = Path(__file__).parents[1]
CONTROL_PLANES = (
    ("cluster", "scale", "rollouts", "failures", "roles", "pod_security_on_api_server",
     "scaling", "canary", "presets", "role_switches"),
    ("faults", "late_answers", "two_operators", "default_image", "costs", "rollout_verbs", "old_crd", "api_server",
     "metrics_asked_for", "chart_on_api_server", "backend_conformance", "model_cache", "admission_warnings",
     "kubernetes_versions"),
)  # fmt: skip
"""Of tests/operator: each group has a control plane of its own; both take about as long."""
CONSOLE = ("tests/console/test_browser.py", "tests/console/test_hostile.py", "tests/gateway/console/test_build.py")
"""These share one browser, and the packages that npm installs."""
SLOW = (
    "benchmarks/test_smoke.py",
    "console/test_browser.py",
    "console/test_hostile.py",
    "engine/server/test_kv_transfer_of_models.py",
    "engine/server/test_serve_kv_transfer.py",
    "engine/distributed/test_parallel_server.py",
    "engine/distributed/test_parallel_engine.py",
    "engine/server/test_serve_life.py",
    "benchmarks/routing/test_floor.py",
    "engine/models/test_demo_model.py",
    "engine/distributed/test_sharded_models.py",
    "engine/server/test_serve_data_parallel.py",
    "engine/speculation/test_same_text.py",
    "operator/local/test_up.py",
    "gateway/pipeline/continuation/test_base.py",
    "test_examples.py",
    "engine/server/test_serve_tools.py",
    "engine/server/test_serve_logprobs.py",
    "test_docs.py",
    "gateway/test_overhead.py",
    "gateway/pipeline/test_disaggregated.py",
    "engine/server/test_serve_hostile_grammars.py",
    "engine/server/test_kv_transfer_pins.py",
    "gateway/test_peers_of_engines.py",
    "engine/server/test_serve_peers.py",
    "gateway/pipeline/responses/test_service.py",
    "engine/offline/test_llm_swap.py",
)
"""The longest first; else one of them would begin when all others have ended."""

settings.register_profile("whatever the machine does", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("whatever the machine does")  # an example may meet a busy processor, and be as right as before

ON_CONTROL_PLANES = {
    f"tests/operator/test_{name}.py": f"control plane {number}"
    for number, names in enumerate(CONTROL_PLANES)
    for name in names
}
WITH_DEMO_SERVER = {
    f"tests/engine/server/test_serve_{name}.py": "demo server" for name in ("tools", "logprobs", "demo", "fields")
}
GROUPS = ON_CONTROL_PLANES | WITH_DEMO_SERVER
_ORDER = {path: place for place, path in enumerate([*ON_CONTROL_PLANES, *(f"tests/{path}" for path in SLOW)])}


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Without garbage collection: what is imported and made meanwhile stays to the end.

    Each of several workers begins elsewhere: a file that pytest has to compile, as all are in a fresh checkout, the
    others find compiled.
    """
    arguments, workers = session.config.args, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1 and [Path(argument).resolve() for argument in arguments] == [ROOT / "tests"]:
        files = sorted(map(str, ROOT.glob("tests/**/test_*.py")))
        arguments[:] = begun_elsewhere(files, int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")), workers)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def begun_elsewhere(files: list[str], worker: int, workers: int) -> list[str]:
    """All of them, for each worker from another place on."""
    first = len(files) * worker // workers
    return files[first:] + files[:first]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SetupErrors(config))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--turn", type=int, metavar="N", help="of the costliest tests, run the eighth whose turn is N")
    parser.addoption("--record-costs", metavar="FILE", help="append each test's CPU seconds, of all processes it reaps")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Records what a test costs, where that is asked for."""
    before = cpu_seconds()
    try:
        return (yield)
    finally:
        if (record := item.config.getoption("--record-costs")) is not None:
            with Path(record).open("a") as file:
                file.write(f"{cpu_seconds() - before:.2f} {item.nodeid}\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts what takes long first, in each worker alike. With --turn, costly tests of other turns are left out.

    Tests that run once more had their turn: turns are dealt out among all tests that are collected.
    """
    if (turn := config.getoption("--turn")) is not None and not config.getoption("--last-failed", default=False):
        out = left_out([item.nodeid for item in items], read_costs(COSTS.read_text()), turn)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in out])
        items[:] = [item for item in items if item.nodeid not in out]

    def place(item: pytest.Item) -> tuple[int, str]:
        path = item.nodeid.split("::", 1)[0]
        return _ORDER.get(path, len(_ORDER)), path

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """What was collected and imported stays to the end: no collection of garbage need look at it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """By file or group, in the order of the collection. `xdist_group` has no effect beside pytest 9.2."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.split("::", 1)[0]
            return GROUPS.get(path, "console" if path in CONSOLE else path)

    config.option.loadscopereorder = False
    return Scheduling(config, log)
