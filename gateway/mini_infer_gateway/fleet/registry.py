"""All endpoints as the gateway knows them now, and the tasks that follow them. Routing reads it, a source feeds it."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mini_infer_contract.api_errors import ApiError
from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.endpoints.base import Listed, Service
from mini_infer_gateway.fleet.breaker import Breaker
from mini_infer_gateway.fleet.catalog import Catalog
from mini_infer_gateway.fleet.endpoint_subscriber import EndpointSubscriber
from mini_infer_gateway.fleet.load import LoadLedger
from mini_infer_gateway.http.upstream import Upstream
from mini_infer_gateway.index.prefix_index import PrefixIndex
from mini_infer_gateway.metrics import Metrics
from mini_infer_gateway.routing.base import Candidate, IndexKind
from mini_infer_gateway.settings import GatewaySettings
from mini_infer_gateway.tokenizers import Tokenizers

DRAIN_PAUSE_S = 2.0
"""An endpoint that said it drains is left alone this long, until its source says so too."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class EndpointState:
    """One endpoint."""

    endpoint: Endpoint
    ready: bool
    subscriber: EndpointSubscriber
    task: asyncio.Task[None]
    breaker: Breaker = field(default_factory=Breaker)
    draining_until_s: float = 0.0

    @property
    def index_kind(self) -> IndexKind:
        """How its cache is known."""
        if not self.subscriber.assets_revision:
            return "none"
        return "exact" if self.subscriber.live else "approximate"

    def candidate(self, now_s: float) -> Candidate:
        """As routing sees it."""
        return Candidate(
            endpoint=self.endpoint,
            ready=self.ready and now_s >= self.draining_until_s,
            circuit_open=self.breaker.is_open(now_s),
            index=self.index_kind,
            assets_revision=self.subscriber.assets_revision,
        )


class Fleet:
    """Members by name, and the catalog of the names that clients use."""

    def __init__(
        self,
        settings: GatewaySettings,
        index: PrefixIndex,
        ledger: LoadLedger,
        tokenizers: Tokenizers,
        upstream: Upstream,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._settings, self._clock = settings, clock
        self._index, self._ledger, self._tokenizers = index, ledger, tokenizers
        self._upstream, self._metrics = upstream, metrics
        self._seen_s: dict[str, float] = {}
        self.endpoints: dict[str, EndpointState] = {}
        self.catalog = Catalog()
        self.synced = False

    def update(self, listed: Sequence[Listed], services: Sequence[Service] | None = None) -> None:
        """The source's whole list: starts to follow what is new, stops what is gone."""
        wanted = {entry.endpoint.name: entry for entry in listed}
        for name, state in list(self.endpoints.items()):
            entry = wanted.get(name)
            if entry is None or _place(entry.endpoint) != _place(state.endpoint):
                self._remove(name)
        for name, entry in wanted.items():
            if known := self.endpoints.get(name):
                known.endpoint, known.ready = entry.endpoint, entry.ready
            else:
                self._add(entry)
        now_s = self._clock()
        self._seen_s |= dict.fromkeys(self.catalog.by_name, now_s)
        self._seen_s = {name: seen_s for name, seen_s in self._seen_s.items() if not self._forgotten(seen_s)}
        self.catalog = Catalog.of((state.endpoint for state in self.endpoints.values()), services)
        self._tokenizers.keep(state.subscriber.assets_revision for state in self.endpoints.values())
        self.synced = True

    def resolve(self, model: str) -> Sequence[str]:
        """Names of the endpoints that serve `model`. ApiError 404: nobody does; 503: nobody does just now."""
        names = self.catalog.by_name.get(model)
        if names is not None:
            return names
        if not self._forgotten(self._seen_s.get(model, float("-inf"))):
            raise no_endpoint(model)
        known = ", ".join(self.catalog.listed) or "none yet"
        message = f"model {model!r} does not exist; models here: {known}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def _forgotten(self, seen_s: float) -> bool:
        return self._clock() - seen_s >= self._settings.forget_model_s

    def candidates(self, names: Sequence[str], now_s: float) -> list[Candidate]:
        """These endpoints as they stand."""
        return [self.endpoints[name].candidate(now_s) for name in names if name in self.endpoints]

    def say_draining(self, name: str) -> None:
        """It answered that it drains."""
        if state := self.endpoints.get(name):
            state.breaker.ended()
            state.draining_until_s = self._clock() + DRAIN_PAUSE_S

    def say_failed(self, name: str, unreachable: bool = False) -> None:
        """It failed a request; `unreachable`: not even a connection could be had."""
        if state := self.endpoints.get(name):
            was_closed = state.breaker.closed
            state.breaker.failed(self._clock())
            if unreachable:
                state.subscriber.suspect()
            if was_closed and not state.breaker.closed:
                log.warning("endpoint %s failed %d times in a row, leaving it alone", name, state.breaker.failures)

    def say_succeeded(self, name: str) -> None:
        """It answered."""
        if state := self.endpoints.get(name):
            if not state.breaker.closed:
                log.info("endpoint %s answers again", name)
            state.breaker.succeeded()

    async def close(self) -> None:
        """Ends all subscribers."""
        tasks = [state.task for state in self.endpoints.values()]
        for name in list(self.endpoints):
            self._remove(name)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _add(self, entry: Listed) -> None:
        endpoint = entry.endpoint
        subscriber = EndpointSubscriber(
            endpoint, self._index, self._ledger, self._tokenizers, self._upstream, self._metrics.event_gap
        )
        task = asyncio.create_task(subscriber.run(), name=f"follow {endpoint.name}")
        task.add_done_callback(_complain)
        self.endpoints[endpoint.name] = EndpointState(endpoint, entry.ready, subscriber, task)
        log.info("endpoint %s at %s serves %s", endpoint.name, endpoint.url, endpoint.model)

    def _remove(self, name: str) -> None:
        self.endpoints.pop(name).task.cancel()
        self._index.clear(name)
        self._ledger.forget(name)
        log.info("endpoint %s is gone", name)


def no_endpoint(model: str, detail: str = "") -> ApiError:
    """The 503 of a model that exists without a pod that can take the request."""
    message = f"no endpoint of model {model!r} can take the request now{detail and f' ({detail})'}; try again shortly"
    return ApiError(503, message, code="no_endpoint", headers={"retry-after": "1"})


def _place(endpoint: Endpoint) -> tuple[str, str, str]:
    """What must stay the same for it to be the same process."""
    return endpoint.url, endpoint.events, endpoint.replay


def _complain(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("%s ended: %r", task.get_name(), error)
