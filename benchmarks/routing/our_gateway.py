"""The gateway under test: its real Router, PrefixIndex and LoadLedger, fed by what simulated engines publish."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from random import Random

from benchmarks.routing.engine_model import Change, Report
from benchmarks.routing.workload import SimulatedRequest
from benchmarks.routing.world import World
from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS, block_keys
from mini_infer_contract.events import BlockRemoved, BlockStored, KVEvent, LoadReport
from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.fleet.backlog import Backlog
from mini_infer_gateway.fleet.load import InFlight, Load, LoadLedger
from mini_infer_gateway.fleet.prefill_rates import PrefillRates
from mini_infer_gateway.fleet.tier_rates import TierRates
from mini_infer_gateway.fleet.transfer_rates import KV_BYTES_PER_TOKEN, TransferRates
from mini_infer_gateway.flow_control.controller import LOOK_EVERY_S, LOOKED_AT
from mini_infer_gateway.flow_control.flow_queue import FlowQueue, QueuedRequest, QueueFullError
from mini_infer_gateway.index.prefix_index import PrefixIndex, prompt_root
from mini_infer_gateway.routing.base import Candidate, Decision, PromptKeys, RoutingRequest
from mini_infer_gateway.routing.pairing import Pairing
from mini_infer_gateway.routing.policies import Policy, build_router

MODEL, REVISION = "simulated", "r"
GUESS_TTL_S, APPROXIMATE_TTL_S = 10.0, 600.0
"""As in GatewaySettings."""
QUEUE_TIMEOUT_S = 1e9
"""Nobody gives up: policies are compared with others that let every request wait."""
NO_LIMIT = 1 << 30


class Keys:
    """Our key of each simulated block: sixteen times the block's identifier stand for its tokens."""

    def __init__(self) -> None:
        self._keys: dict[int, bytes] = {}

    def of(self, blocks: Sequence[int]) -> list[bytes]:
        """The chain of keys; an identifier fixes all that comes before it, so each is computed once."""
        known = self._keys
        parent, keys = prompt_root(), []
        for block in blocks:
            key = known.get(block)
            if key is None:
                key = known[block] = block_keys([block] * BLOCK_SIZE_TOKENS, parent)[0]
            parent = key
            keys.append(key)
        return keys


def event(change: Change) -> KVEvent:
    """A change of a simulated cache as an engine would tell it."""
    if not change.is_stored:
        return BlockRemoved(block_hashes=change.what, medium=change.medium)
    parent, blocks = change.what
    return BlockStored(
        block_hashes=blocks,
        parent_block_hash=None if parent < 0 else parent,
        token_ids=[block for block in blocks for _ in range(BLOCK_SIZE_TOKENS)],
        block_size=BLOCK_SIZE_TOKENS,
        medium=change.medium,
    )


def _endpoint(name: str, number: int, prefill_count: int) -> Endpoint:
    """Of a fleet without prefill engines each does all."""
    if not prefill_count:
        return Endpoint(name=name, url="", model=MODEL)
    role = "prefill" if number < prefill_count else "decode"
    return Endpoint(name=name, url="", model=MODEL, role=role, transfer=f"tcp://{name}:5559")


@dataclass(slots=True, eq=False)
class Queued(QueuedRequest):
    """A request of the simulation that may wait."""

    simulated: SimulatedRequest | None = None


class OurGateway:
    """Routes and queues as the gateway does; it is its queue's outlet."""

    def __init__(
        self,
        world: World,
        keys: Keys,
        policy: Policy,
        exact: bool = True,
        seed: int = 0,
        max_queue: int = NO_LIMIT,
        max_local_prefill_tokens: int | None = None,
    ) -> None:
        self._world, self._keys, self._exact = world, keys, exact
        self.index, self.ledger = PrefixIndex(4_000_000), LoadLedger()
        self.rates, self.transfers, self.backlog = PrefillRates(), TransferRates(), Backlog()
        self.tier_rates = TierRates()
        self.queue = FlowQueue(self, self.backlog, self.rates, max_queue)
        self.router = build_router(
            policy,
            self.index,
            self.ledger,
            Random(seed),
            rates=self.rates,
            tier_rates=self.tier_rates,
            backlog=self.backlog,
            pairing=Pairing(self.transfers, max_local_prefill_tokens) if world.prefill_count else None,
            block_size_tokens=world.shape.block_tokens,
        )
        self._numbers = {engine.name: number for number, engine in enumerate(world.engines)}
        self._every = [
            Candidate(
                _endpoint(engine.name, number, world.prefill_count),
                index="exact" if exact else "approximate",
                assets_revision=REVISION,
            )
            for number, engine in enumerate(world.engines)
        ]
        self._candidates = [one for one, serves in zip(self._every, world.serving, strict=True) if serves]
        self._looks, self._rounds = False, count()
        self._flights: dict[int, tuple[InFlight, int, float]] = {}
        """Request -> what was sent, prompt tokens there before its answer, and when."""
        self._prefills: dict[int, tuple[InFlight, float]] = {}
        """Request whose prompt is computed apart -> what was sent there, and how long it should take."""
        self.placements: Counter[str] = Counter()
        """By reason."""

    def arrive(self, request: SimulatedRequest, now_s: float) -> None:
        """See SimulatedGateway."""
        order = (0, now_s + QUEUE_TIMEOUT_S, request.number)
        selected = replace(self._routing_request(request), order=order)
        entry = Queued(order, MODEL, request=selected, simulated=request)
        try:
            self.queue.offer(entry, now_s)
        except QueueFullError as full:
            self._world.refuse(request, full.retry_after_s)
        if entry.endpoint:
            self._world.answers[request.number].predicted_wait_s = entry.predicted_wait_s
            self._look_later()

    def first_token(self, request: SimulatedRequest, engine: int, now_s: float) -> None:
        """See SimulatedGateway."""
        flight, tokens, sent_s = self._flights[request.number]
        self.ledger.answered(flight)
        if request.number in self._prefills:
            prefill, expected_s = self._prefills.pop(request.number)
            self.ledger.finish(prefill)
            self.transfers.observe(expected_s, now_s - sent_s, now_s)
            self._later(prefill.endpoint)
            return
        if not self._exact:
            self.rates.observe(flight.endpoint, tokens, now_s - sent_s)
            self._later(flight.endpoint)

    def finished(self, request: SimulatedRequest, engine: int, now_s: float) -> None:
        """See SimulatedGateway."""
        flight, _, _ = self._flights.pop(request.number)
        self.ledger.finish(flight)
        self._later(flight.endpoint)

    def joined(self, engine: int, now_s: float) -> None:
        """See SimulatedGateway."""
        self._candidates = [one for one, serves in zip(self._every, self._world.serving, strict=True) if serves]

    def died(self, engine: int, lost: Sequence[SimulatedRequest], now_s: float) -> None:
        """See SimulatedGateway."""
        name = self._every[engine].name
        self._candidates = [one for one in self._candidates if one.name != name]
        for request in lost:
            self.ledger.finish(self._flights.pop(request.number)[0])
        self.index.clear(name)
        self.ledger.remove(name)
        known = [one.name for one in self._candidates]
        self.rates.keep(known)
        self.queue.keep(known)
        while self.backlog.waiting(name):
            self.queue.place_anew(name, now_s)
        for request in lost:
            self.arrive(request, now_s)

    def _look_later(self) -> None:
        if not self._looks:
            self._looks = True
            self._world.call_at(self._world.now_s + LOOK_EVERY_S, self._look)

    def _look(self, now_s: float) -> None:
        """As FlowController.look: now and then everything is looked at, since engines come without a word."""
        self._looks = False
        waited_for = self.backlog.endpoints()
        for endpoint in waited_for:
            self.queue.pump(endpoint, now_s)
        idle = sorted({one.name for one in self._candidates}.difference(waited_for))
        for _ in range(min(LOOKED_AT, len(idle))):
            self.queue.pump(idle[next(self._rounds) % len(idle)], now_s)
        if self.backlog:
            self._look_later()

    def _later(self, endpoint: str) -> None:
        """An engine tells of tokens in the middle of its own work."""
        self._world.call_at(self._world.now_s, lambda now_s: self.queue.pump(endpoint, now_s))

    def news(self, engine: int, events: Sequence[Change], report: Report, now_s: float) -> None:
        """See SimulatedGateway; a gateway whose event sockets are dead hears nothing."""
        if not self._exact or not self._world.serving[engine]:
            return
        name = self._world.engines[engine].name
        if events:
            self.index.apply(name, [event(change) for change in events])
        accepted = [str(number) for number in report.accepted]
        host = self._world.shape.host
        load = LoadReport(
            report.measured_s,
            report.running,
            report.waiting,
            report.queued_tokens,
            report.kv_usage,
            accepted,
            # Measured anew all the time: a rate that stays as it is would be forgotten.
            host_tokens_per_s=host.tokens_per_s + 1e-3 * report.measured_s if host.blocks else 0.0,
            transfer_bytes_per_s=self._world.transfer_tokens_per_s * KV_BYTES_PER_TOKEN + 1e-3 * report.measured_s,
        )
        self.ledger.report(name, load)
        self.rates.report(name, load)
        self.transfers.report(name, load)
        self.tier_rates.report(name, load)
        self.queue.report(name, report.queued_tokens, now_s)

    # What the queue asks of its outlet.

    def route(self, entry: QueuedRequest, now_s: float) -> Decision | None:
        """See Outlet."""
        assert entry.request is not None
        return self.router.route(entry.request, self._candidates, now_s)

    def send(self, entry: QueuedRequest, decision: Decision, now_s: float) -> None:
        """See Outlet."""
        assert isinstance(entry, Queued)
        assert entry.simulated is not None
        assert entry.request is not None
        name, request = decision.decode.name, entry.simulated
        expires_s = now_s + (GUESS_TTL_S if self._exact else APPROXIMATE_TTL_S)
        self.index.guess(name, entry.request.prompts[REVISION].chains[0], expires_s)
        uncached = 0 if decision.prefill else max(0, request.prompt_tokens - decision.hit_tokens)
        tokens = self.ledger.load(name).queued_tokens + uncached
        self._flights[request.number] = (self.ledger.start(name, str(request.number), uncached), tokens, now_s)
        prefill = None
        if decision.prefill:
            other = decision.prefill.name
            self.index.guess(other, entry.request.prompts[REVISION].chains[0], expires_s)
            flight = self.ledger.start(other, str(request.number), decision.prefill_tokens)
            self._prefills[request.number] = flight, decision.first_token_s
            prefill = self._numbers[other]
        self.placements[decision.prefill_reason] += 1
        self._world.send(request, self._numbers[name], prefill)

    def refuse(self, entry: QueuedRequest, retry_after_s: int) -> None:
        """See Outlet."""
        assert isinstance(entry, Queued)
        assert entry.simulated is not None
        self._world.refuse(entry.simulated, retry_after_s)

    def abandon(self, entry: QueuedRequest) -> None:
        """See Outlet."""
        raise AssertionError("a simulated fleet always has an engine left")

    def load(self, endpoint: str) -> Load:
        """See Outlet."""
        return self.ledger.load(endpoint)

    def _routing_request(self, request: SimulatedRequest) -> RoutingRequest:
        whole = request.prompt_tokens // self._world.shape.block_tokens
        prompt = PromptKeys(request.prompt_tokens, (self._keys.of(request.blocks[:whole]),))
        return RoutingRequest(MODEL, request.prompt_tokens, {REVISION: prompt})
