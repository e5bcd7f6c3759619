"""What a reference policy is: a choice at arrival. Most send a request at once, and queues are the engines' own."""

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from benchmarks.routing.engine_model import Change, EngineModel, Report
from benchmarks.routing.mirror import MirroredEngine, MirroredFleet
from benchmarks.routing.workload import SimulatedRequest
from benchmarks.routing.world import World


class View:
    """What a policy may know of the fleet."""

    def __init__(self, world: World | MirroredFleet, exact: bool) -> None:
        self.engines: Sequence[EngineModel] | Sequence[MirroredEngine] = world.engines
        self.serving: Sequence[bool] = world.serving
        self.block_tokens = world.shape.block_tokens
        self.in_flight = [0] * len(world.engines)
        """Requests of this gateway, from their sending to their end."""
        self.active_blocks: list[Counter[int]] = [Counter() for _ in world.engines]
        """Whole prompt blocks of those requests, and by how many of them."""
        self._guessed: list[OrderedDict[int, None]] | None = None if exact else [OrderedDict() for _ in world.engines]
        self._capacity = world.shape.kv_blocks

    def numbers(self) -> list[int]:
        """Returns the engines that may be chosen."""
        return [number for number, serves in enumerate(self.serving) if serves]

    def hit_blocks(self, request: SimulatedRequest, engine: int) -> int:
        """Blocks of the prompt there: the cache itself, or (approximate) an LRU list of what was sent there."""
        if self._guessed is None:
            return self.engines[engine].match_blocks(request)
        limit = (request.prompt_tokens - 1) // self.block_tokens
        guessed = self._guessed[engine]
        count = 0
        for block in request.blocks[:limit]:
            if block not in guessed:
                break
            count += 1
        return count

    def load(self, engine: int) -> int:
        """Requests there, running or waiting, whoever sent them."""
        return len(self.engines[engine].running) + len(self.engines[engine].waiting)

    def note(self, request: SimulatedRequest, engine: int) -> None:
        """A request was sent there."""
        self.in_flight[engine] += 1
        self.active_blocks[engine].update(self._prompt_blocks(request))
        if self._guessed is not None:
            guessed = self._guessed[engine]
            for block in reversed(request.blocks[: request.prompt_tokens // self.block_tokens]):
                guessed[block] = None
                guessed.move_to_end(block)
            while len(guessed) > self._capacity:
                guessed.popitem(last=False)

    def ended(self, request: SimulatedRequest, engine: int) -> None:
        """A request that was sent there is over."""
        self.in_flight[engine] -= 1
        active = self.active_blocks[engine]
        for block in self._prompt_blocks(request):
            active[block] -= 1
            if not active[block]:
                del active[block]

    def engine_gone(self, engine: int) -> None:
        """An engine died."""
        if self._guessed is not None:
            self._guessed[engine].clear()

    def _prompt_blocks(self, request: SimulatedRequest) -> tuple[int, ...]:
        return request.blocks[: request.prompt_tokens // self.block_tokens]


class SentPrefixes:
    """What a router believes to be cached: for each engine an LRU list of what was sent there, as large as its cache.

    sglang, smg and vLLM's router keep it as a radix tree of text.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in view.engines]

    def matched_tokens(self, request: SimulatedRequest, engine: int) -> int:
        """Returns the leading tokens of the prompt that were sent there before."""
        sent, count = self._sent[engine], 0
        for block in request.blocks:
            if block not in sent:
                break
            count += 1
        return min(request.prompt_tokens, count * self._view.block_tokens)

    def insert(self, request: SimulatedRequest, engine: int) -> None:
        """A request is sent there; what engines no longer serve is forgotten."""
        for number, serves in enumerate(self._view.serving):
            if not serves:
                self._sent[number].clear()
        sent = self._sent[engine]
        for block in reversed(request.blocks[: request.prompt_tokens // self._view.block_tokens]):
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > self._view.engines[engine].shape.kv_blocks:
            sent.popitem(last=False)


class Policy(Protocol):
    """A rule that chooses at arrival."""

    def choose(self, request: SimulatedRequest, view: View) -> int:
        """The engine's number."""


@runtime_checkable
class QueueingPolicy(Policy, Protocol):
    """A rule with a queue of its own."""

    def admits(self, view: View) -> bool:
        """Returns False while a request is to wait at the gateway, first come, first served."""


class ReferenceGateway:
    """A gateway that follows a policy."""

    def __init__(self, world: World, policy: Policy, exact: bool = True) -> None:
        self._world, self._policy = world, policy
        self._view = View(world, exact)
        self._waiting: deque[SimulatedRequest] = deque()

    def arrive(self, request: SimulatedRequest, now_s: float) -> None:
        """See SimulatedGateway."""
        self._waiting.append(request)
        self._send()

    def _send(self) -> None:
        policy = self._policy
        while self._waiting and (not isinstance(policy, QueueingPolicy) or policy.admits(self._view)):
            request = self._waiting.popleft()
            engine = policy.choose(request, self._view)
            self._view.note(request, engine)
            self._world.send(request, engine)

    def joined(self, engine: int, now_s: float) -> None:
        """See SimulatedGateway."""
        self._send()

    def died(self, engine: int, lost: Sequence[SimulatedRequest], now_s: float) -> None:
        """See SimulatedGateway."""
        self._view.engine_gone(engine)
        for request in lost:
            self._view.ended(request, engine)
        self._waiting.extendleft(reversed(lost))
        self._send()

    def first_token(self, request: SimulatedRequest, engine: int, now_s: float) -> None:
        """See SimulatedGateway."""
        self._send()

    def finished(self, request: SimulatedRequest, engine: int, now_s: float) -> None:
        """See SimulatedGateway."""
        self._view.ended(request, engine)
        self._send()

    def news(self, engine: int, events: Sequence[Change], report: Report, now_s: float) -> None:
        """See SimulatedGateway; it looks at the engines instead."""
