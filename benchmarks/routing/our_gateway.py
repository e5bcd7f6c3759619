"""The gateway under test: its real Router, PrefixIndex and LoadLedger, fed by what simulated engines publish."""

from collections.abc import Sequence
from random import Random
from typing import Any

from benchmarks.routing.engine_model import Report
from benchmarks.routing.workload import SimulatedRequest
from benchmarks.routing.world import World
from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS, block_keys
from mini_infer_contract.events import MEDIUM_GPU, BlockRemoved, BlockStored, KVEvent, LoadReport
from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.fleet.load import InFlight, LoadLedger
from mini_infer_gateway.index.prefix_index import PrefixIndex, prompt_root
from mini_infer_gateway.routing.base import Candidate, Decision, PromptKeys, RoutingRequest
from mini_infer_gateway.routing.policies import Policy, build_router

MODEL, REVISION = "simulated", "r"
GUESS_TTL_S, APPROXIMATE_TTL_S = 10.0, 600.0
"""As in GatewaySettings."""


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


def event(stored: bool, what: Any) -> KVEvent:
    """A change of a simulated cache as an engine would tell it."""
    if not stored:
        return BlockRemoved(block_hashes=what, medium=MEDIUM_GPU)
    parent, blocks = what
    return BlockStored(
        block_hashes=blocks,
        parent_block_hash=None if parent < 0 else parent,
        token_ids=[block for block in blocks for _ in range(BLOCK_SIZE_TOKENS)],
        block_size=BLOCK_SIZE_TOKENS,
        medium=MEDIUM_GPU,
    )


class OurGateway:
    """Routes at arrival, as the gateway does without a queue."""

    def __init__(self, world: World, keys: Keys, policy: Policy, exact: bool = True, seed: int = 0) -> None:
        self._world, self._keys, self._exact = world, keys, exact
        self.index, self.ledger = PrefixIndex(4_000_000), LoadLedger()
        self.router = build_router(
            policy, self.index, self.ledger, Random(seed), block_size_tokens=world.shape.block_tokens
        )
        self._numbers = {engine.name: number for number, engine in enumerate(world.engines)}
        self._candidates = [
            Candidate(
                Endpoint(name=engine.name, url="", model=MODEL),
                index="exact" if exact else "approximate",
                assets_revision=REVISION,
            )
            for engine in world.engines
        ]
        self._flights: dict[int, InFlight] = {}

    def arrive(self, request: SimulatedRequest, now_s: float) -> None:
        """See SimulatedGateway."""
        wanted = self._routing_request(request)
        decision = self.router.route(wanted, self._candidates, now_s)
        assert decision is not None
        self._send(request, wanted, decision, now_s)

    def first_token(self, request: SimulatedRequest, engine: int, now_s: float) -> None:
        """See SimulatedGateway."""
        self._flights[request.number].answered = True

    def finished(self, request: SimulatedRequest, engine: int, now_s: float) -> None:
        """See SimulatedGateway."""
        self.ledger.finish(self._flights.pop(request.number))

    def news(self, engine: int, events: Sequence[tuple[bool, Any]], report: Report, now_s: float) -> None:
        """See SimulatedGateway; a gateway whose event sockets are dead hears nothing."""
        if not self._exact:
            return
        name = self._world.engines[engine].name
        if events:
            self.index.apply(name, [event(stored, what) for stored, what in events])
        accepted = [str(number) for number in report.accepted]
        self.ledger.report(
            name, LoadReport(now_s, report.running, report.waiting, report.queued_tokens, report.kv_usage, accepted)
        )

    def _routing_request(self, request: SimulatedRequest) -> RoutingRequest:
        whole = request.prompt_tokens // self._world.shape.block_tokens
        prompt = PromptKeys(request.prompt_tokens, (self._keys.of(request.blocks[:whole]),))
        return RoutingRequest(MODEL, request.prompt_tokens, {REVISION: prompt})

    def _send(self, request: SimulatedRequest, wanted: RoutingRequest, decision: Decision, now_s: float) -> None:
        name = decision.decode.name
        expires_s = now_s + (GUESS_TTL_S if self._exact else APPROXIMATE_TTL_S)
        self.index.guess(name, wanted.prompts[REVISION].chains[0], expires_s)
        uncached = max(0, request.prompt_tokens - decision.hit_tokens)
        self._flights[request.number] = self.ledger.start(name, str(request.number), uncached)
        self._world.send(request, self._numbers[name])
