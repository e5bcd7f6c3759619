"""Assembles the operator behind kopf's handlers: one cache, one queue, a Lease and their tasks. Decides nothing."""

import asyncio
import logging
import secrets
import signal
import socket
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import kopf
from kubernetes.aio.client.rest import RESTClientObject

from mini_infer_operator.controller import gauges
from mini_infer_operator.controller.controller import Controller
from mini_infer_operator.controller.feed import Feed
from mini_infer_operator.controller.health import Health
from mini_infer_operator.controller.kopf_settings import watched
from mini_infer_operator.controller.lease import LeaderLease
from mini_infer_operator.controller.metrics import OperatorMetrics, plural_of
from mini_infer_operator.controller.served_crd import ServedCrd
from mini_infer_operator.objects.api import KubernetesApi, RefusedError
from mini_infer_operator.objects.cache import ObjectCache, ServiceKey
from mini_infer_operator.objects.copied_bytes import CopiedBytes
from mini_infer_operator.objects.engine_roles import EngineRoles
from mini_infer_operator.objects.events import EventRecorder, KopfPoster
from mini_infer_operator.objects.gateway_loads import GatewayLoadReader
from mini_infer_operator.objects.kinds import Kind
from mini_infer_operator.objects.loading_reports import LoadingReports
from mini_infer_operator.objects.model_implementations import ModelImplementations
from mini_infer_operator.objects.peer_secrets import PeerSecrets
from mini_infer_operator.objects.running_requests import RunningRequests
from mini_infer_operator.resource import KIND, PRESET_KIND
from mini_infer_operator.settings import OperatorSettings
from mini_infer_web.kubernetes_api import REQUEST_ERRORS, ApiServer, load_configuration, traced

log = logging.getLogger(__name__)

_ROOT_RETRY_S = 5.0


class Operator:
    """The operator of one run of kopf: created before it, started and stopped by its handlers, and never reused."""

    def __init__(self, settings: OperatorSettings, appeared: Callable[[str], None] = lambda plural: None) -> None:
        """Must be called while an event loop runs.

        `appeared` is called with the plural of a resource that the cluster did not serve at the start and serves now.
        """
        self.metrics = OperatorMetrics()
        self.failure: BaseException | None = None
        """The error that ended a task of the operator's own, or None."""
        self._settings = settings
        self._server = ApiServer(seen=self.metrics.request_seen)
        self._crd = ServedCrd(self._server, lambda: appeared("inferenceservices"))
        self._api = KubernetesApi(self._server, self._crd.fit_status)
        self._cache = ObjectCache()
        self._poster = KopfPoster()
        self._peers = PeerSecrets(self._api, settings.identity)
        self._tasks: asyncio.Task[None] | None = None
        events = EventRecorder(self._poster.post)
        self._engines = aiohttp.ClientSession(auto_decompress=False)
        running = RunningRequests(self._engines)
        self._implementations = ModelImplementations(self._engines, lambda key: self._controller.changed(key))
        copied = CopiedBytes(self._api, self._engines)
        gateways = GatewayLoadReader(self._engines, settings.gateways)
        roles = EngineRoles(self._engines, self._peers)
        self._loading = LoadingReports(self._engines, lambda key: self._controller.changed(key))
        of_engines = running, self._peers, self._implementations, copied, gateways, roles, self._loading
        self._controller = Controller(self._api, self._cache, settings, events, self.metrics, *of_engines)
        self._feeds = {
            (kind.plural, namespace): Feed(
                self._api, self._cache, kind, namespace, self._changed_by(kind), lambda kind: appeared(kind.plural)
            )
            for kind in watched(clusterwide=not settings.namespaces)
            for namespace in settings.namespaces or (None,)
        }
        if settings.namespaces:
            self._cache.unserved.add(PRESET_KIND)
        self._by_path = {feed.path: feed for feed in self._feeds.values()}
        feeds = list(self._feeds.values())
        self.metrics.gauges(
            gauges.services(self._cache),
            gauges.queue_depth(lambda: self._controller.queue),
            gauges.oldest_unsynced(lambda: self._controller.queue),
            gauges.watch_age(feeds),
            gauges.info(lambda: self._crd.state),
        )
        self.health = Health(feeds, self._controller.untried_s, self._crd.problem)

    async def start(self) -> None:
        """Starts the tasks as one group: if any of them ends other than by `stop`, the process ends."""
        await self._crd.look()
        self._tasks = asyncio.create_task(self._run(), name="the operator's tasks")

    async def stop(self) -> None:
        """Ends all work, gives the Lease back, and closes the connections."""
        if self._tasks is not None:
            self._tasks.cancel()
            await asyncio.gather(self._tasks, return_exceptions=True)
        await self._controller.stop()
        await self._implementations.close()
        await self._loading.close()
        await self._engines.close()
        await self._server.close()

    def observe(self, kind: Kind, event_type: str | None, found: Mapping[str, Any]) -> None:
        """Takes an object that kopf listed (type None) or that its watch reported."""
        self._poster.enter()
        feed = self._feeds.get((kind.plural, found["metadata"].get("namespace"))) or self._feeds.get(
            (kind.plural, None)
        )
        if feed is not None:
            feed.take(event_type, found)

    def _changed_by(self, kind: Kind) -> Callable[[ServiceKey], None]:
        """Returns the function that a kind's feed calls with the service of an object that changed."""
        controller = self._controller
        if kind.name == PRESET_KIND:
            return lambda _: controller.presets_changed()
        return controller.service_changed if kind.name == KIND else controller.changed

    async def session(self) -> kopf.AiohttpSession:
        """Returns a session for kopf with the official client's configuration. Its requests are counted as ours are.

        Raises AccessError if no API server can be reached with the credentials found.
        """
        configuration = await load_configuration()
        token = await configuration.get_api_key_with_prefix("BearerToken")
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=RESTClientObject(configuration).ssl_context),
            headers={"Authorization": token} if token else {},
            proxy=configuration.proxy,
            trace_configs=[traced(self._kopf_requested)],
        )
        return kopf.AiohttpSession(server=configuration.host, aiohttp_session=session)

    def _kopf_requested(self, method: str, path: str, query: Mapping[str, str], status: int | None) -> None:
        self.metrics.request_seen(method, path, query, status)
        feed = self._by_path.get(path)
        if feed is not None and method == "GET" and status is not None and status < 400:
            feed.requested(listed="watch" not in query)
        elif feed is None and "watch" in query and plural_of(path)[0] in {plural for plural, _ in self._feeds}:
            log.error(
                "kopf watches %s: give its namespaces in MINI_INFER_NAMESPACES as well as in -n, or in neither", path
            )

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for feed in self._feeds.values():
                    tasks.create_task(feed.run(), name=f"list {feed.kind.plural}")
                tasks.create_task(self._crd.run(), name="look at the CRD")
                tasks.create_task(self._make_root_secret(), name="make the root secret of peers")
                tasks.create_task(self._work_once_synced(), name="work")
        except Exception as error:
            self.failure = error
            log.critical("the operator ends: %s", error, exc_info=error)
            signal.raise_signal(signal.SIGTERM)  # kopf's way to stop, embedded or not

    async def _make_root_secret(self) -> None:
        """Creates the root secret before there is any service: gateways mount it, and start only once it exists."""
        while True:
            try:
                await self._peers.root()
                return
            except (RefusedError, *REQUEST_ERRORS) as error:
                log.warning("no root secret of peers yet, trying again in %.0f s: %s", _ROOT_RETRY_S, error)
            await asyncio.sleep(_ROOT_RETRY_S)

    async def _work_once_synced(self) -> None:
        for feed in self._feeds.values():
            await feed.synced.wait()
        namespace, name = self._settings.lease
        me = f"{socket.gethostname()}_{secrets.token_hex(4)}"
        controller = self._controller
        await LeaderLease(self._server, namespace, name, me, controller.start, controller.stop).run()
