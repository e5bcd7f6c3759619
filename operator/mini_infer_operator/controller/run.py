"""`mini-infer-operator`: watches fill a cache and put keys into a queue, which runs `reconcile`. Decides nothing."""

import asyncio
import logging
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime

import aiohttp

from mini_infer_contract.kubernetes_access import AccessError, ClusterAccess, find_access
from mini_infer_contract.kubernetes_client import ApiError, KubernetesClient
from mini_infer_operator.controller import gauges
from mini_infer_operator.controller.apply_crd import apply_crd
from mini_infer_operator.controller.events import EventRecorder
from mini_infer_operator.controller.failed_passes import FailedPasses
from mini_infer_operator.controller.health import Health, serve_health
from mini_infer_operator.controller.lease import LeaderLease
from mini_infer_operator.controller.metrics import OperatorMetrics
from mini_infer_operator.controller.ownership import ServiceOwnership
from mini_infer_operator.controller.pacing import ImageTurns
from mini_infer_operator.controller.queue import WorkQueue
from mini_infer_operator.controller.reflector import Reflector
from mini_infer_operator.controller.served_crd import ServedCrd
from mini_infer_operator.controller.settings import OperatorSettings, parse_settings
from mini_infer_operator.objects.api import KubernetesApi, RefusedError
from mini_infer_operator.objects.backend import ClusterBackend
from mini_infer_operator.objects.cache import ObjectCache, ServiceKey
from mini_infer_operator.objects.kinds import KINDS
from mini_infer_operator.objects.peer_secrets import PeerSecrets
from mini_infer_operator.objects.running_requests import RunningRequests
from mini_infer_operator.plan.model_names import ModelNames
from mini_infer_operator.resource import KIND, LABEL_SERVICE
from mini_infer_operator.status import progress_ended
from mini_infer_process.logs import configure_logging, show_crashes

log = logging.getLogger(__name__)

_ROOT_RETRY_S = 5.0


def reflectors_of(
    client: KubernetesClient, cache: ObjectCache, settings: OperatorSettings, changed: Callable[[ServiceKey], None]
) -> list[Reflector]:
    """One for each kind that is watched, in each namespace that is looked after."""
    return [
        Reflector(client, cache, kind, namespace, LABEL_SERVICE if kind.is_labelled else None, changed)
        for kind in KINDS
        if "watch" in kind.verbs
        for namespace in settings.namespaces or (None,)
    ]


class Controller:
    """The queue over the cache. It works only once everything was listed: an engine not seen yet is not a lost one."""

    def __init__(
        self,
        api: KubernetesApi,
        cache: ObjectCache,
        settings: OperatorSettings,
        events: EventRecorder,
        metrics: OperatorMetrics,
        running: RunningRequests,
        peers: PeerSecrets | None = None,
    ) -> None:
        self._cache = cache
        self._metrics = metrics
        self._settings = settings
        self._turns = ImageTurns[ServiceKey](settings.max_rolling_services, settings.max_rolling_gpus, self.changed)
        self._names = ModelNames()
        peers = peers or PeerSecrets(api, settings.identity)
        self._passes = FailedPasses[ServiceKey](
            lambda key: ClusterBackend(api, cache, settings, *key, events, self._turns, running, self._names, peers)
        )
        self._ownership = ServiceOwnership(api, cache, settings, events)
        self._queue: WorkQueue[ServiceKey] | None = None

    @property
    def queue(self) -> WorkQueue[ServiceKey] | None:
        """None while another replica leads."""
        return self._queue

    def changed(self, key: ServiceKey) -> None:
        """An object of this service is not what it was."""
        if not key[1]:
            return
        others = self._names.update(key, self._cache.get(KIND, *key))
        if self._queue is not None:
            for each in (key, *others):
                self._queue.add(each)

    def start(self) -> None:
        """Work on every service there is, and from now on on those that change."""
        self._turns.restart()
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
        pause_s = await self._observed_pass(key)
        if pause_s is None:
            self._turns.release(key)
        return pause_s

    async def _observed_pass(self, key: ServiceKey) -> float | None:
        before, begun_s, failure = gauges.stored_status(self._cache, key), time.monotonic(), None
        try:
            return await self._passes.reconcile(key)
        except Exception as error:
            failure = error
            raise
        finally:
            self._metrics.pass_ended(time.monotonic() - begun_s, failure)
            after = gauges.stored_status(self._cache, key)
            if (ended := progress_ended(before, after, datetime.now(UTC))) is not None:
                self._metrics.rollout_ended(*ended)


async def run_operator(settings: OperatorSettings, access: ClusterAccess) -> None:
    """Run until SIGINT or SIGTERM. Owns every task that it starts."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    cache, metrics = ObjectCache(), OperatorMetrics()
    async with KubernetesClient(access, metrics.request_seen) as client, aiohttp.ClientSession() as session:
        crd = ServedCrd(client)
        await crd.look()
        api = KubernetesApi(client, crd.fit_status)
        events = EventRecorder(api)
        peers = PeerSecrets(api, settings.identity)
        controller = Controller(api, cache, settings, events, metrics, RunningRequests(session), peers)
        reflectors = reflectors_of(client, cache, settings, controller.changed)
        metrics.gauges(
            gauges.services(cache),
            gauges.queue_depth(lambda: controller.queue),
            gauges.oldest_unsynced(lambda: controller.queue),
            gauges.watch_age(reflectors),
            gauges.info(lambda: crd.state),
        )
        health = Health(reflectors, lambda: controller.queue.untried_s() if controller.queue else 0.0, crd.problem)
        runner = await serve_health(health, metrics.exposition, settings.health_port)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    *(tasks.create_task(watch.run(), name=f"watch {watch.kind.plural}") for watch in reflectors),
                    tasks.create_task(events.run(), name="post events"),
                    tasks.create_task(crd.run(), name="look at the CRD"),
                    tasks.create_task(_make_root_secret(peers), name="make the root secret of peers"),
                    tasks.create_task(_work_once_synced(client, controller, reflectors, settings), name="work"),
                ]
                await stop.wait()
                for task in running:
                    task.cancel()
        finally:
            await controller.stop()
            await runner.cleanup()


async def _make_root_secret(peers: PeerSecrets) -> None:
    """Makes it before there is any service: gateways mount it, and start when it is there."""
    while True:
        try:
            await peers.root()
            return
        except (ApiError, RefusedError, aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("no root secret of peers yet, trying again in %.0f s: %s", _ROOT_RETRY_S, error)
        await asyncio.sleep(_ROOT_RETRY_S)


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
    show_crashes()
    if sys.argv[1:] == ["--apply-crd"]:
        sys.exit(apply_crd())
    settings = parse_settings()
    configure_logging(settings.log_level)
    try:
        access = find_access()
    except AccessError as error:
        sys.exit(f"mini-infer-operator: {error}")
    asyncio.run(run_operator(settings, access))


if __name__ == "__main__":
    main()
