"""Runs `reconcile` for each service that changed, while this replica is the leader. Decides nothing."""

import asyncio
import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from mini_infer_operator.controller.canaries import Canaries
from mini_infer_operator.controller.failed_passes import FailedPasses
from mini_infer_operator.controller.metrics import OperatorMetrics
from mini_infer_operator.controller.queue import WorkQueue
from mini_infer_operator.controller.scaling import Scaling
from mini_infer_operator.objects.api import KubernetesApi
from mini_infer_operator.objects.backend import ClusterBackend
from mini_infer_operator.objects.cache import ObjectCache, ServiceKey
from mini_infer_operator.objects.copied_bytes import CopiedBytes
from mini_infer_operator.objects.engine_roles import EngineRoles
from mini_infer_operator.objects.engine_starts import EngineStarts
from mini_infer_operator.objects.events import EventRecorder
from mini_infer_operator.objects.gateway_loads import GatewayLoadReader
from mini_infer_operator.objects.loading_reports import LoadingReports
from mini_infer_operator.objects.model_implementations import ModelImplementations
from mini_infer_operator.objects.peer_secrets import PeerSecrets
from mini_infer_operator.objects.running_requests import RunningRequests
from mini_infer_operator.plan.model_names import ModelNames
from mini_infer_operator.plan.rollout_throttle import RolloutThrottle
from mini_infer_operator.presets.resolve import is_outdated
from mini_infer_operator.resource import KIND, SCALER_KIND
from mini_infer_operator.settings import OperatorSettings
from mini_infer_operator.status import progress_ended

log = logging.getLogger(__name__)


class Controller:
    """Feeds the work queue from the cache. It must start after the first lists: an engine not seen yet is not lost."""

    def __init__(
        self,
        api: KubernetesApi,
        cache: ObjectCache,
        settings: OperatorSettings,
        events: EventRecorder,
        metrics: OperatorMetrics,
        running: RunningRequests,
        peers: PeerSecrets,
        implementations: ModelImplementations,
        copied: CopiedBytes,
        gateways: GatewayLoadReader,
        roles: EngineRoles,
        loading: LoadingReports | None = None,
    ) -> None:
        self._cache = cache
        self._metrics = metrics
        self._settings = settings
        self._throttle = RolloutThrottle[ServiceKey](
            settings.max_rolling_services, settings.max_rolling_gpus, self.changed
        )
        self._names = ModelNames()
        self._implementations = implementations
        self._roles = roles

        self._scaling = Scaling(
            cache, gateways, events, self.changed, gpus_per_namespace=settings.scaling_gpus_per_namespace
        )
        self._preset_look: asyncio.Handle | None = None
        self._canaries = Canaries(gateways, self.changed)
        self._planning: list[asyncio.Task[None]] = []
        self._starts = EngineStarts(metrics.engine_started, loading)

        def backend(key: ServiceKey) -> ClusterBackend:
            planner, engines = self._scaling, (self._starts, self._canaries.observed, roles)
            sources = (running, self._names, peers, implementations, copied, planner.decided, *engines, planner.loads)
            return ClusterBackend(api, cache, settings, key[0], key[1], events, self._throttle, *sources)

        self._passes = FailedPasses[ServiceKey](backend)
        self._queue: WorkQueue[ServiceKey] | None = None

    @property
    def queue(self) -> WorkQueue[ServiceKey] | None:
        """The work queue, or None while another replica leads."""
        return self._queue

    def untried_s(self) -> float:
        """Returns the longest that the queue left a changed service untried; 0 while another replica leads."""
        return self._queue.untried_s() if self._queue is not None else 0.0

    def service_changed(self, key: ServiceKey) -> None:
        """Queues a service that was written or deleted, and the services whose model names that affects."""
        stored = self._cache.get(KIND, *key)
        self._follow(key, stored)
        for each in (key, *self._names.update(key, stored)):
            self.changed(each)

    def changed(self, key: ServiceKey) -> None:
        """Queues a service because something that belongs to it changed."""
        if self._queue is not None and key[1]:
            self._queue.add(key)

    def presets_changed(self) -> None:
        """Queues the services to which another preset, or another generation of it, now applies. Changes that are
        reported together are looked at together.
        """
        if self._preset_look is None and self._queue is not None:
            self._preset_look = asyncio.get_running_loop().call_soon(self._queue_by_preset)

    def _queue_by_preset(self) -> None:
        self._preset_look = None
        presets = self._cache.presets()
        for key in self._cache.keys(KIND) if self._queue is not None else ():
            stored = self._cache.get(KIND, *key)
            if stored is not None and is_outdated(stored, presets):
                self.changed(key)

    def start(self) -> None:
        """Queues every service, and those that a scaler names, and from now on each one that changes."""
        self._throttle.restart()
        self._starts.restart(datetime.now(UTC))
        self._queue = WorkQueue(self._work, resync_s=self._settings.resync_s)
        for key in {*self._cache.keys(KIND), *self._cache.services_of(SCALER_KIND)}:
            stored = self._cache.get(KIND, *key)
            self._follow(key, stored)
            self._queue.add(key)
        self._planning = [
            asyncio.create_task(self._scaling.run(), name="numbers of engines are planned"),
            asyncio.create_task(self._canaries.run(), name="canaries are judged"),
        ]
        for task in self._planning:
            task.add_done_callback(_log_failure)

    async def stop(self) -> None:
        """Cancels all work and waits for its end."""
        planning, self._planning = self._planning, []
        for task in planning:
            task.cancel()
        await asyncio.gather(*planning, return_exceptions=True)
        queue, self._queue = self._queue, None
        if queue is not None:
            await queue.close()

    def _follow(self, key: ServiceKey, stored: Mapping[str, Any] | None) -> None:
        """Lets the planner and the canaries know a service of ours."""
        ours = stored if stored is not None and self._is_ours(stored) else None
        self._scaling.update(key, ours)
        self._canaries.update(key, ours)

    async def _work(self, key: ServiceKey) -> float | None:
        stored = self._cache.get(KIND, *key)
        if stored is not None and not self._is_ours(stored):
            self._throttle.release(key)
            return float("inf")
        pause_s = await self._observed_pass(key, stored or {})
        if pause_s is None:
            self._throttle.release(key)
            self._implementations.forget(key)
            self._starts.forget(key)
            self._roles.forget(key)
        return pause_s

    def _is_ours(self, stored: Mapping[str, Any]) -> bool:
        """True if the service belongs to this operator's class."""
        return (stored["spec"].get("operatorClass") or "") == self._settings.operator_class

    async def _observed_pass(self, key: ServiceKey, before: Mapping[str, Any]) -> float | None:
        started_s, failure = time.monotonic(), None
        try:
            return await self._passes.reconcile(key)
        except Exception as error:
            failure = error
            raise
        finally:
            self._metrics.pass_ended(time.monotonic() - started_s, failure)
            # the pass may have written another step into the status, which no event announces: the cache has it already
            after = self._cache.get(KIND, *key) or {}
            self._canaries.update(key, after)
            ended = progress_ended(before.get("status") or {}, after.get("status") or {}, datetime.now(UTC))
            if ended is not None:
                self._metrics.rollout_ended(*ended)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("until a restart it is no longer true that %s: %r", task.get_name(), error, exc_info=error)
