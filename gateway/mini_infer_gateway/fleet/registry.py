"""All endpoints as the gateway knows them now, and the tasks that follow them. Routing reads it, a source feeds it."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.endpoints.base import Listed, Service
from mini_infer_gateway.endpoints.canary import Canary
from mini_infer_gateway.fleet.attempt_record import AttemptRecord
from mini_infer_gateway.fleet.breaker import Breaker, Cause, Evidence
from mini_infer_gateway.fleet.catalog import Catalog, orphaned
from mini_infer_gateway.fleet.endpoint_state import EndpointState, Waiting
from mini_infer_gateway.fleet.endpoint_subscriber import EndpointSubscriber, ServedModel
from mini_infer_gateway.fleet.load import LoadLedger
from mini_infer_gateway.fleet.name_owners import NameOwners, read_rules
from mini_infer_gateway.fleet.peer_keys import PeerKeys
from mini_infer_gateway.fleet.watchdog import Watchdog
from mini_infer_gateway.http.fetch_memory import FetchMemory
from mini_infer_gateway.http.upstream import Upstream
from mini_infer_gateway.index.prefix_index import PrefixIndex
from mini_infer_gateway.metrics import Metrics
from mini_infer_gateway.prompts.tokenizers import Tokenizers
from mini_infer_gateway.routing.base import Candidate
from mini_infer_gateway.settings import GatewaySettings
from mini_infer_web.api_errors import ApiError, unknown_model

FIRST_LOOK_S = 5.0
"""Seconds for engines to report their tokenizer before the gateway is ready; without it, load alone decides."""

PRODUCER_FAULTS = frozenset(
    ("unreachable", "late", "peer_lost", "transport", "lease_expired", "refused", "mismatch", "distrusted")
)
"""Reasons of an engine to compute a prompt itself that count as failures of the engine that was to provide it. Other
reasons mean that nothing was lost, for example that computing is cheaper by now.
"""

RELEASE_EVERY_S = 5.0
SNAPSHOTS_PART = 8
"""Snapshots that are being read take at most one part in this many of the gateway's memory."""

log = logging.getLogger(__name__)


class Fleet:
    """All endpoints by name, and the catalog of the names that clients use."""

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
        self._keys = PeerKeys(settings.peer_secret)
        self._snapshots = FetchMemory(settings.memory_limit_bytes // SNAPSHOTS_PART)
        self._seen_s: dict[str, float] = {}
        self._services: tuple[Service, ...] = ()
        """All services, including deleted ones whose engines still exist."""
        self.endpoints: dict[str, EndpointState] = {}
        self.canaries: dict[str, Canary] = {}
        """The canaries of services by namespace/name."""
        self.catalog = Catalog()
        self._rules, self._owners = read_rules(settings.model_namespaces), NameOwners(settings.forget_model_s)
        self._last: tuple[Sequence[Listed], Sequence[Service] | None] = ((), None)
        self.synced = False
        self._synced_s = 0.0

    def update(self, listed: Sequence[Listed], services: Sequence[Service] | None = None) -> None:
        """Takes the source's whole list: starts to follow new endpoints, and stops those that are removed."""
        by_name = {entry.endpoint.name: entry for entry in listed}
        for name, state in list(self.endpoints.items()):
            entry = by_name.get(name)
            if entry is None or _place(entry.endpoint) != _place(state.endpoint):
                self._remove(name)
        for name, entry in by_name.items():
            if current := self.endpoints.get(name):
                if entry.ready and not current.ready:
                    current.breaker.learned(Evidence.READY_AGAIN)
                current.endpoint, current.ready = entry.endpoint, entry.ready
            else:
                self._add(entry)
        self.canaries = {service.name: service.canary for service in services or () if service.canary is not None}
        for state in self.endpoints.values():
            canary = self.canaries.get(state.endpoint.service)
            state.canary = canary if canary and canary.revision == state.endpoint.revision else None
        now_s = self._clock()
        self._seen_s |= dict.fromkeys(self.catalog.by_name, now_s)
        self._seen_s = {name: seen_s for name, seen_s in self._seen_s.items() if not self._has_expired(seen_s)}
        endpoints = [state.endpoint for state in self.endpoints.values()]
        left = () if services is None else orphaned(self._services, services, endpoints)
        self._services = (*(services or ()), *left)
        catalog = Catalog.of(endpoints, services, left, self._rules)
        # In a file whoever wrote it has decided.
        withheld, changes = (frozenset(), []) if services is None else self._owners.settle(catalog.owners, now_s)
        for change in changes:
            self._metrics.name_changed(change.is_withheld)
            log.warning(
                "the model name %r %s from %s to %s: --model-namespaces says who may own a name",
                change.model,
                f"will go in {self._settings.forget_model_s:g} s" if change.is_withheld else "goes",
                change.before or "no service",
                change.after or "no service",
            )
        self.catalog, self._last = catalog.without(withheld), (listed, services)
        self._tokenizers.keep(state.subscriber.assets_revision for state in self.endpoints.values())
        self._upstream.proofs = self._proofs()
        self._synced_s = self._synced_s if self.synced else now_s
        self.synced = True

    @property
    def is_ready(self) -> bool:
        """True if the endpoints are known, and each has been queried for its tokenizer or had time enough to answer."""
        queried = all(state.subscriber.tokenizer_queried for state in self.endpoints.values())
        return self.synced and (queried or self._clock() - self._synced_s > FIRST_LOOK_S)

    def resolve(self, model: str) -> Sequence[str]:
        """Returns the endpoints that serve `model`. Raises ApiError: 404 if it is unknown, 503 if none serves
        it now.
        """
        names = self.catalog.by_name.get(model)
        if names is not None:
            return names
        if not self._has_expired(self._seen_s.get(model, float("-inf"))):
            raise no_endpoint(model)
        raise unknown_model(model, self.catalog.listed)

    def starts_on_demand(self, model: str) -> bool:
        """Returns True if an engine of this model is started when a request waits for one."""
        return model in self.catalog.on_demand

    def _has_expired(self, seen_s: float) -> bool:
        return self._clock() - seen_s >= self._settings.forget_model_s

    def candidates(self, names: Sequence[str], now_s: float) -> list[Candidate]:
        """Returns these endpoints as candidates in their current state."""
        return [self.endpoints[name].candidate(now_s) for name in names if name in self.endpoints]

    def assets_revisions(self, names: Sequence[str]) -> set[str]:
        """Returns the revisions of the prompt assets of these endpoints."""
        return {self.endpoints[name].subscriber.assets_revision for name in names if name in self.endpoints}

    def max_prompt_tokens(self, names: Sequence[str]) -> int | None:
        """Returns the largest context length of these endpoints; None if that of one of them is unknown."""
        lengths = [model.max_model_len for model in self._models(names)]
        return None if None in lengths else max((length for length in lengths if length), default=None)

    def parsers(self, names: Sequence[str]) -> tuple[str | None, str | None]:
        """Returns the parsers of tool calls and of reasoning of these endpoints.

        A parser is None if the endpoints have none, do not report one, or disagree.
        """
        models = self._models(names)
        return _agreed(model.tool_call_parser for model in models), _agreed(model.reasoning_parser for model in models)

    def model_impl(self, names: Sequence[str]) -> str | None:
        """Returns the code by which these endpoints compute; None if they do not report it, or disagree."""
        return _agreed(model.model_impl for model in self._models(names))

    def _models(self, names: Sequence[str]) -> list[ServedModel]:
        return [self.endpoints[name].subscriber.model for name in names if name in self.endpoints]

    def begin(self, name: str, request: Waiting) -> AttemptRecord:
        """Records that `request` is sent to this endpoint. Raises KeyError if it was removed since it was chosen."""
        return AttemptRecord(self.endpoints[name], request, self._clock)

    def computed_for_another(self, name: str, fallback: str) -> None:
        """Records the start of an answer whose prompt this endpoint was to compute.

        `fallback` is the reason why the decode engine did not get its KV cache; "" if it did.
        """
        state = self.endpoints.get(name)
        if state is None:
            return
        breaker, was_closed = state.breaker, state.breaker.closed
        if not fallback:
            breaker.succeeded(breaker.generation)
        elif fallback in PRODUCER_FAULTS:
            breaker.failed(breaker.generation, self._clock(), Cause.TRANSFER)
        if was_closed and not breaker.closed:
            log.warning("endpoint %s did not give KV cache several times (%s), leaving it alone", name, fallback)

    def why_not_tokenized_here(self, name: str) -> str:
        """Returns why an endpoint's engine tokenises its prompts; "" if the gateway does, or none does."""
        return self._tokenizers.reason(self.endpoints[name].subscriber.assets_revision)

    async def watch(self) -> None:
        """Ejects endpoints that stopped working, and assigns released names to their next owners, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(Watchdog(self.endpoints, self._upstream, self._clock).run(), name="watchdog")
            tasks.create_task(self._release_names(), name="release model names")

    async def _release_names(self) -> None:
        while True:
            await asyncio.sleep(RELEASE_EVERY_S)
            if self._owners.is_withholding:
                self.update(*self._last)

    async def close(self) -> None:
        """Ends all subscribers."""
        states = list(self.endpoints.values())
        tasks = [task for state in states for task in (state.task, state.probe) if task]
        for state in states:
            self._remove(state.endpoint.name)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _add(self, entry: Listed) -> None:
        endpoint = entry.endpoint
        breaker = Breaker()
        secret = self._keys.secret_of(endpoint)
        if endpoint.peer_auth and secret is None:
            log.error(
                "endpoint %s needs proof that the gateway belongs to its service, and there is no --peer-key-file: its "
                "KV events are not followed",
                endpoint.name,
            )
        subscriber = EndpointSubscriber(
            endpoint,
            self._index,
            self._ledger,
            self._tokenizers,
            self._upstream,
            self._metrics.event_gap,
            lambda evidence: self._learned(endpoint.name, evidence),
            self._clock,
            self._settings.stale_ttl_s,
            secret,
            self._snapshots,
        )
        task = asyncio.create_task(subscriber.run(), name=f"follow {endpoint.name}")
        task.add_done_callback(_complain)
        self.endpoints[endpoint.name] = EndpointState(endpoint, entry.ready, subscriber, task, breaker)
        log.info("endpoint %s at %s serves %s", endpoint.name, endpoint.url, endpoint.model)

    def _proofs(self) -> dict[str, bytes]:
        """Returns by URL the proof that each endpoint that requires one gets with every request."""
        secrets = {state.endpoint.url: self._keys.secret_of(state.endpoint) for state in self.endpoints.values()}
        return {url: secret.http_token().encode() for url, secret in secrets.items() if secret is not None}

    def _learned(self, name: str, evidence: Evidence) -> bool:
        """Takes evidence from a subscriber. Returns True if it closed the circuit."""
        state = self.endpoints[name]
        if evidence is Evidence.SOCKET and not state.breaker.closed:
            # Another process, whose HTTP server may not be there yet: the watchdog asks it.
            state.unready = True
            return False
        return state.breaker.learned(evidence)

    def _remove(self, name: str) -> None:
        state = self.endpoints.pop(name)
        state.task.cancel()
        if state.probe:
            state.probe.cancel()
        self._index.clear(name)
        self._ledger.remove(name)
        self._metrics.remove_endpoint(name)
        # One that drains is trusted to finish what it has; any other that goes may be a node that was lost.
        if not state.endpoint.draining:
            for request in list(state.waiting):
                request.move("removed")
        log.info("endpoint %s is removed", name)


def no_endpoint(model: str, detail: str = "") -> ApiError:
    """Returns the 503 for a known model without a pod that can take the request."""
    message = f"no endpoint of model {model!r} can take the request now{detail and f' ({detail})'}; try again shortly"
    return ApiError(503, message, code="no_endpoint", headers={"retry-after": "1"})


def _place(endpoint: Endpoint) -> tuple[str, ...]:
    """Returns the fields that identify a process and its proof: if one changes, it is a different process."""
    proof = (endpoint.peer_auth, endpoint.service) if endpoint.peer_auth else ()
    return endpoint.url, endpoint.events, endpoint.replay, endpoint.transfer, *proof


def _agreed(reported: Iterable[str | None]) -> str | None:
    """Returns the value on which all agree that report one; None if none does, or they disagree."""
    values = {value for value in reported if value is not None}
    return values.pop() if len(values) == 1 else None


def _complain(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("%s ended: %r", task.get_name(), error)
