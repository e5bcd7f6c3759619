"""Runs `mini-infer-operator`: kopf with our handlers, and beside it `/healthz`, `/readyz` and `/metrics`.

An error that ends kopf (in a watch, other than 410; a resource that is gone) does not end the process: kopf starts
again, from whole lists, after a pause. It also restarts when a resource appears that it did not find at its start, such
as LeaderWorkerSet: to notice those itself, it would need to watch the CRDs and namespaces of the whole cluster.
"""

import asyncio
import contextlib
import gc
import logging
import signal
import sys

import kopf

from mini_infer_operator.controller.apply_crd import apply_crd
from mini_infer_operator.controller.health import serve_health
from mini_infer_operator.controller.operator import Operator
from mini_infer_operator.handlers import register
from mini_infer_operator.settings import OperatorSettings, parse_settings
from mini_infer_process.event_loop import loop_factory
from mini_infer_process.logs import configure_logging, show_crashes
from mini_infer_web.kubernetes_api import AccessError, load_configuration

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
STEADY_AFTER_S = 300.0
"""Seconds after which a run of kopf counts as steady: the pause after it is the first one again."""
YOUNG_OBJECTS = 3000
"""New objects after which Python's garbage collector looks for cycles among them; its default is 700."""

log = logging.getLogger(__name__)


class KopfRuns:
    """Runs kopf repeatedly, each time with a new `Operator`."""

    def __init__(self, settings: OperatorSettings) -> None:
        """Must be called while an event loop runs."""
        self._settings = settings
        self._registry = register(kopf.OperatorRegistry(), clusterwide=not settings.namespaces)
        self._stopped = asyncio.Event()
        self._ends = asyncio.Event()
        """Ends the current run of kopf when set."""
        self.current = Operator(settings, self._appeared)

    async def run(self) -> None:
        """Runs kopf until SIGINT or SIGTERM, or until a task of the operator's own fails (`current.failure`)."""
        loop, pause_s = asyncio.get_running_loop(), FIRST_PAUSE_S
        while True:
            started_s = loop.time()
            is_broken = not await self._run_once()
            if self._stopped.is_set() or self.current.failure is not None or not (is_broken or self._ends.is_set()):
                return
            if is_broken:
                pause_s = FIRST_PAUSE_S if loop.time() - started_s >= STEADY_AFTER_S else pause_s
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._stopped.wait()
                        return
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            self._ends = asyncio.Event()
            self.current = Operator(self._settings, self._appeared)

    async def _run_once(self) -> bool:
        """Returns False if an error ended kopf."""
        try:
            await kopf.operator(
                registry=self._registry,
                memo=kopf.Memo(operator=self.current, embedded=self._take_signals),
                clusterwide=not self._settings.namespaces,
                namespaces=self._settings.namespaces,
                standalone=True,
                stop_flag=self._ends,
            )
        except Exception as error:
            level = logging.INFO if self._stopped.is_set() else logging.ERROR
            log.log(level, "kopf ended: %s: %s", type(error).__name__, error)
            return False
        return True

    def _take_signals(self) -> None:
        """Replaces kopf's signal handlers: after those, the reason why kopf ended would be unknown."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stop)

    def _stop(self) -> None:
        self._stopped.set()
        self._ends.set()

    def _appeared(self, plural: str) -> None:
        log.info("the cluster knows %s by now: kopf starts anew, to watch them too", plural)
        self._ends.set()


async def run_operator(settings: OperatorSettings) -> bool:
    """Runs until SIGINT or SIGTERM. Returns False if a task of the operator's own failed."""
    runs = KopfRuns(settings)
    runner = await serve_health(
        lambda: runs.current.health, lambda: runs.current.metrics.exposition(), settings.health_port
    )
    try:
        await runs.run()
    finally:
        await runner.cleanup()
    return runs.current.failure is None


class QuietKopf(logging.Filter):
    """Leaves out the tracebacks of kopf's own tasks, which show kopf's internals; those of handlers stay."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns False for asyncio's messages about kopf's tasks that nobody awaited, whose errors kopf has logged,
        and for Events that a namespace does not take since it ends: four lines for each would be no news.
        """
        if record.name.startswith("kopf._core"):
            record.exc_info = record.exc_text = None
        if record.name == "asyncio":
            return "kopf/_cogs" not in record.getMessage()
        return record.name != "kopf._core.engines.posting" or "NamespaceTerminating" not in record.getMessage()


def _quieten_kopf() -> None:
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # or a line for each event: "Handler succeeded"
    for handler in logging.getLogger().handlers:
        handler.addFilter(QuietKopf())


def _collect_less_garbage() -> None:
    """Leaves modules out of collections, and collects a quarter as often as Python's default: half of the time that
    collections take while services start, for the same memory.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def main() -> None:
    """Runs the `mini-infer-operator` command."""
    show_crashes()
    if sys.argv[1:] == ["--apply-crd"]:
        sys.exit(apply_crd())
    settings = parse_settings()
    configure_logging(settings.log_level)
    _quieten_kopf()
    try:
        asyncio.run(load_configuration())
    except AccessError as error:
        sys.exit(f"mini-infer-operator: {error}")
    _collect_less_garbage()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        sys.exit(0 if runner.run(run_operator(settings)) else 1)


if __name__ == "__main__":
    main()
