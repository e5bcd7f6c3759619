"""`mini-infer-operator`: kopf's watches put keys into our queue; the queue runs `reconcile`. Decides nothing."""

import asyncio
import contextlib
import logging
import signal
from itertools import repeat
from typing import Any

import kopf

from mini_infer_contract.resources import GROUP, LABEL_SERVICE, PLURAL, VERSION
from mini_infer_operator.controller.events import EventRecorder
from mini_infer_operator.controller.health import WatchHealth, serve_health
from mini_infer_operator.controller.queue import WorkQueue
from mini_infer_operator.controller.settings import OperatorSettings, parse_settings
from mini_infer_operator.objects.api import KubernetesApi
from mini_infer_operator.objects.backend import ClusterBackend
from mini_infer_operator.objects.kinds import CHILD_KINDS
from mini_infer_operator.reconcile import reconcile

log = logging.getLogger(__name__)

LIST_EVERY_S = 30.0
"""Pause between lists of all services: finds what a watch missed (see health.py)."""

WATCH_AGAIN_S = 5.0

ServiceKey = tuple[str, str]
"""Namespace and name."""


def build_registry(queue: WorkQueue[ServiceKey], health: WatchHealth) -> kopf.OperatorRegistry:
    """The watches: services and their children. Event handlers only, so kopf itself never writes to any object."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**given: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**given) or kopf.login_with_kubeconfig(**given)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def service_changed(body: kopf.Body, **_: Any) -> None:
        metadata = body.metadata
        key = (str(metadata.namespace), str(metadata.name))
        health.saw(key, str(metadata["resourceVersion"]))
        queue.add(key)

    async def child_changed(body: kopf.Body, **_: Any) -> None:
        queue.add((str(body.metadata.namespace), body.metadata.labels[LABEL_SERVICE]))

    labelled = {LABEL_SERVICE: kopf.PRESENT}
    for kind in CHILD_KINDS:
        kopf.on.event(kind.group, kind.version, kind.plural, labels=labelled, registry=registry)(child_changed)
    return registry


def kopf_settings() -> kopf.OperatorSettings:
    """Watches end on both sides, errors are tried again for ever, nothing is posted; one operator needs no peers."""
    settings = kopf.OperatorSettings()
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 10
    for kind in CHILD_KINDS:
        settings.watching.label_selectors[kind.group, kind.version, kind.plural] = LABEL_SERVICE
    settings.networking.request_timeout = 30
    settings.networking.error_backoffs = _Endless()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.peering.standalone = True
    return settings


class _Endless:
    """1, 2, 4, 8, 10, 10, ... seconds."""

    def __iter__(self) -> Any:
        yield from (1, 2, 4, 8)
        yield from repeat(10)


async def watch(
    settings: OperatorSettings, queue: WorkQueue[ServiceKey], health: WatchHealth, stop: asyncio.Event
) -> None:
    """Run kopf until `stop`, or until it fails: it gives up where a CRD is deleted, or a watch breaks in a new way."""
    stop_on_signals(stop)
    try:
        await kopf.operator(
            registry=build_registry(queue, health),
            settings=kopf_settings(),
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            stop_flag=stop,
        )
        stop.set()  # kopf has its own signal handlers
    except Exception as error:
        log.error("watching ended: %s: %s; again in %g s", type(error).__name__, error, WATCH_AGAIN_S)
        stop_on_signals(stop)  # in place of kopf's
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WATCH_AGAIN_S):
                await stop.wait()


def stop_on_signals(stop: asyncio.Event) -> None:
    """SIGINT and SIGTERM set `stop`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


async def run_operator(settings: OperatorSettings) -> None:
    """Run until SIGINT or SIGTERM. Owns every task that it starts."""
    stop = asyncio.Event()
    api = await KubernetesApi.connect()
    health, events = WatchHealth(), EventRecorder(api)

    async def work(key: ServiceKey) -> float | None:
        return await reconcile(ClusterBackend(api, settings, *key, events))

    queue = WorkQueue(work, resync_s=settings.resync_s)

    async def list_services() -> None:
        while True:
            try:
                found = [
                    service
                    for namespace in settings.namespaces or (None,)
                    for service in await api.list("InferenceService", namespace)
                ]
                metadata = {(s["metadata"]["namespace"], s["metadata"]["name"]): s["metadata"] for s in found}
                for key in health.listed({key: item["resourceVersion"] for key, item in metadata.items()}):
                    queue.add(key)
            except Exception as error:
                log.warning("cannot list services: %s", str(error).split("\n", 1)[0])
            await asyncio.sleep(LIST_EVERY_S)

    runner = await serve_health(health, settings.health_port)
    lister = asyncio.create_task(list_services(), name="list services")
    poster = asyncio.create_task(events.run(), name="post events")
    try:
        while not stop.is_set():
            await watch(settings, queue, health, stop)
    finally:
        await queue.close()
        lister.cancel()
        poster.cancel()
        await asyncio.gather(lister, poster, return_exceptions=True)
        await runner.cleanup()
        await api.close()


def main() -> None:
    """Entry point."""
    settings = parse_settings()
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # it reports every event

    asyncio.run(run_operator(settings))


if __name__ == "__main__":
    main()
