"""`mini-infer-operator`: watches fill a cache and put keys into a queue, which runs `reconcile`. Decides nothing."""

import asyncio
import logging
import secrets
import signal
import socket
from collections.abc import Callable

from mini_infer_contract.kubernetes_access import find_access
from mini_infer_contract.kubernetes_client import KubernetesClient
from mini_infer_contract.resources import KIND, LABEL_SERVICE
from mini_infer_operator.controller.events import EventRecorder
from mini_infer_operator.controller.failed_passes import FailedPasses
from mini_infer_operator.controller.health import WatchHealth, serve_health
from mini_infer_operator.controller.lease import LeaderLease
from mini_infer_operator.controller.ownership import ServiceOwnership
from mini_infer_operator.controller.queue import WorkQueue
from mini_infer_operator.controller.reflector import Reflector
from mini_infer_operator.controller.settings import OperatorSettings, parse_settings
from mini_infer_operator.objects.api import KubernetesApi
from mini_infer_operator.objects.backend import ClusterBackend
from mini_infer_operator.objects.cache import ObjectCache, ServiceKey
from mini_infer_operator.objects.kinds import KINDS

log = logging.getLogger(__name__)


def reflectors_of(
    client: KubernetesClient, cache: ObjectCache, settings: OperatorSettings, changed: Callable[[ServiceKey], None]
) -> list[Reflector]:
    """One for each kind that is watched, in each namespace that is looked after."""
    return [
        Reflector(client, cache, kind, namespace, None if kind.name == KIND else LABEL_SERVICE, changed)
        for kind in KINDS
        if "watch" in kind.verbs
        for namespace in settings.namespaces or (None,)
    ]


class Controller:
    """The queue over the cache. It works only once everything was listed: an engine not seen yet is not a lost one."""

    def __init__(
        self, api: KubernetesApi, cache: ObjectCache, settings: OperatorSettings, events: EventRecorder
    ) -> None:
        self._cache = cache
        self._settings = settings
        self._passes = FailedPasses[ServiceKey](lambda key: ClusterBackend(api, cache, settings, *key, events))
        self._ownership = ServiceOwnership(api, cache, settings, events)
        self._queue: WorkQueue[ServiceKey] | None = None

    def changed(self, key: ServiceKey) -> None:
        """An object of this service is not what it was."""
        if self._queue is not None and key[1]:
            self._queue.add(key)

    def start(self) -> None:
        """Work on every service there is, and from now on on those that change."""
        self._queue = WorkQueue(self._work, resync_s=self._settings.resync_s)
        for key in self._cache.keys(KIND):
            self._queue.add(key)

    async def stop(self) -> None:
        """Cancel all work and wait for its end."""
        queue, self._queue = self._queue, None
        if queue is not None:
            await queue.close()

    async def _work(self, key: ServiceKey) -> float | None:
        wait_s = await self._ownership.wait_s(key)
        if wait_s is not None:
            return wait_s
        return await self._passes.reconcile(key)


async def run_operator(settings: OperatorSettings) -> None:
    """Run until SIGINT or SIGTERM. Owns every task that it starts."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    cache = ObjectCache()
    async with KubernetesClient(find_access()) as client:
        api = KubernetesApi(client)
        events = EventRecorder(api)
        controller = Controller(api, cache, settings, events)
        reflectors = reflectors_of(client, cache, settings, controller.changed)
        runner = await serve_health(WatchHealth(reflectors), settings.health_port)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    *(tasks.create_task(watch.run(), name=f"watch {watch.kind.plural}") for watch in reflectors),
                    tasks.create_task(events.run(), name="post events"),
                    tasks.create_task(_work_once_synced(client, controller, reflectors, settings), name="work"),
                ]
                await stop.wait()
                for task in running:
                    task.cancel()
        finally:
            await controller.stop()
            await runner.cleanup()


async def _work_once_synced(
    client: KubernetesClient, controller: Controller, reflectors: list[Reflector], settings: OperatorSettings
) -> None:
    for watch in reflectors:
        await watch.synced.wait()
    namespace, _, name = settings.identity.partition("/")
    me = f"{socket.gethostname()}_{secrets.token_hex(4)}"
    await LeaderLease(client, namespace, f"{name}-operator", me, controller.start, controller.stop).run()


def main() -> None:
    """Entry point."""
    settings = parse_settings()
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(run_operator(settings))


if __name__ == "__main__":
    main()
