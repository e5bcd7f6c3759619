"""All endpoints as the gateway knows them now, and the tasks that follow them. Routing reads it, a source feeds it."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mini_infer_contract.api_errors import ApiError
from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.breaker import Breaker
from mini_infer_gateway.catalog import Catalog
from mini_infer_gateway.endpoints.base import Listed
from mini_infer_gateway.follower import Follower
from mini_infer_gateway.load import LoadLedger
from mini_infer_gateway.metrics import Metrics
from mini_infer_gateway.prefix_index import PrefixIndex
from mini_infer_gateway.prompts import Prompts
from mini_infer_gateway.routing.base import Candidate, IndexKind
from mini_infer_gateway.settings import GatewaySettings
from mini_infer_gateway.upstream import Upstream

DRAIN_PAUSE_S = 2.0
"""An endpoint that said it drains is left alone this long, until its source says so too."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Member:
    """One endpoint."""

    endpoint: Endpoint
    ready: bool
    follower: Follower
    task: asyncio.Task[None]
    breaker: Breaker = field(default_factory=Breaker)
    draining_until_s: float = 0.0

    @property
    def index_kind(self) -> IndexKind:
        """How its cache is known."""
        if not self.follower.assets_revision:
            return "none"
        return "exact" if self.follower.live else "approximate"

    def candidate(self, now_s: float) -> Candidate:
        """As routing sees it."""
        return Candidate(
            endpoint=self.endpoint,
            ready=self.ready and now_s >= self.draining_until_s,
            broken=self.breaker.refuses(now_s),
            index=self.index_kind,
            assets_revision=self.follower.assets_revision,
        )


class Fleet:
    """Members by name, and the catalog of the names that clients use."""

    def __init__(
        self,
        settings: GatewaySettings,
        index: PrefixIndex,
        ledger: LoadLedger,
        prompts: Prompts,
        upstream: Upstream,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._settings, self._clock = settings, clock
        self._index, self._ledger, self._prompts = index, ledger, prompts
        self._upstream, self._metrics = upstream, metrics
        self._seen_s: dict[str, float] = {}
        self.members: dict[str, Member] = {}
        self.catalog = Catalog()
        self.synced = False

    def update(self, listed: Sequence[Listed]) -> None:
        """The source's whole list: starts to follow what is new, stops what is gone."""
        wanted = {entry.endpoint.name: entry for entry in listed}
        for name, member in list(self.members.items()):
            entry = wanted.get(name)
            if entry is None or _place(entry.endpoint) != _place(member.endpoint):
                self._remove(name)
        for name, entry in wanted.items():
            if known := self.members.get(name):
                known.endpoint, known.ready = entry.endpoint, entry.ready
            else:
                self._add(entry)
        now_s = self._clock()
        self._seen_s |= dict.fromkeys(self.catalog.by_name, now_s)
        self.catalog = Catalog.of(member.endpoint for member in self.members.values())
        self._prompts.keep(member.follower.assets_revision for member in self.members.values())
        self.synced = True

    def resolve(self, model: str) -> Sequence[str]:
        """Names of the endpoints that serve `model`. ApiError 404: nobody does; 503: nobody does just now."""
        names = self.catalog.by_name.get(model)
        if names is not None:
            return names
        if self._clock() - self._seen_s.get(model, float("-inf")) < self._settings.forget_model_s:
            raise no_endpoint(model)
        known = ", ".join(self.catalog.listed) or "none yet"
        message = f"model {model!r} does not exist; models here: {known}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def candidates(self, names: Sequence[str], now_s: float) -> list[Candidate]:
        """These endpoints as they stand."""
        return [self.members[name].candidate(now_s) for name in names if name in self.members]

    def say_draining(self, name: str) -> None:
        """It answered that it drains."""
        if member := self.members.get(name):
            member.breaker.ended()
            member.draining_until_s = self._clock() + DRAIN_PAUSE_S

    def say_failed(self, name: str, unreachable: bool = False) -> None:
        """It failed a request; `unreachable`: not even a connection could be had."""
        if member := self.members.get(name):
            was_closed = member.breaker.closed
            member.breaker.failed(self._clock())
            if unreachable:
                member.follower.suspect()
            if was_closed and not member.breaker.closed:
                log.warning("endpoint %s failed %d times in a row, leaving it alone", name, member.breaker.failures)

    def say_succeeded(self, name: str) -> None:
        """It answered."""
        if member := self.members.get(name):
            if not member.breaker.closed:
                log.info("endpoint %s answers again", name)
            member.breaker.succeeded()

    async def close(self) -> None:
        """Ends all followers."""
        tasks = [member.task for member in self.members.values()]
        for name in list(self.members):
            self._remove(name)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _add(self, entry: Listed) -> None:
        endpoint = entry.endpoint
        follower = Follower(endpoint, self._index, self._ledger, self._prompts, self._upstream, self._metrics.event_gap)
        task = asyncio.create_task(follower.run(), name=f"follow {endpoint.name}")
        task.add_done_callback(_complain)
        self.members[endpoint.name] = Member(endpoint, entry.ready, follower, task)
        log.info("endpoint %s at %s serves %s", endpoint.name, endpoint.url, endpoint.model)

    def _remove(self, name: str) -> None:
        self.members.pop(name).task.cancel()
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
