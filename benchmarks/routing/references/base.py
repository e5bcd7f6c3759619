"""What a reference policy is: a choice at arrival. The request goes out at once; queues are the engines' own."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

from benchmarks.routing.engine_model import EngineModel, Report
from benchmarks.routing.mirror import MirroredEngine, MirroredFleet
from benchmarks.routing.workload import SimulatedRequest
from benchmarks.routing.world import World


class View:
    """What a policy may know of the fleet."""

    def __init__(self, world: World | MirroredFleet, exact: bool) -> None:
        self.engines: Sequence[EngineModel] | Sequence[MirroredEngine] = world.engines
        self.block_tokens = world.shape.block_tokens
        self.in_flight = [0] * len(world.engines)
        """Requests of this gateway, from their sending to their end."""
        self._guessed: list[OrderedDict[int, None]] | None = None if exact else [OrderedDict() for _ in world.engines]
        self._room = world.shape.kv_blocks

    def hit_blocks(self, request: SimulatedRequest, engine: int) -> int:
        """Blocks of the prompt there: the cache itself, or (approximate) an LRU list of what was sent there."""
        if self._guessed is None:
            return self.engines[engine].match_blocks(request)
        limit = (request.prompt_tokens - 1) // self.block_tokens
        known = self._guessed[engine]
        count = 0
        for block in request.blocks[:limit]:
            if block not in known:
                break
            count += 1
        return count

    def load(self, engine: int) -> int:
        """Requests there, running or waiting, whoever sent them."""
        return len(self.engines[engine].running) + len(self.engines[engine].waiting)

    def note(self, request: SimulatedRequest, engine: int) -> None:
        """A request was sent there."""
        self.in_flight[engine] += 1
        if self._guessed is not None:
            known = self._guessed[engine]
            for block in reversed(request.blocks[: request.prompt_tokens // self.block_tokens]):
                known[block] = None
                known.move_to_end(block)
            while len(known) > self._room:
                known.popitem(last=False)


class Policy(Protocol):
    """A rule that chooses at arrival."""

    def choose(self, request: SimulatedRequest, view: View) -> int:
        """The engine's number."""


class ReferenceGateway:
    """A gateway that follows a policy."""

    def __init__(self, world: World, policy: Policy, exact: bool = True) -> None:
        self._world, self._policy = world, policy
        self._view = View(world, exact)

    def arrive(self, request: SimulatedRequest, now_s: float) -> None:
        """See SimulatedGateway."""
        engine = self._policy.choose(request, self._view)
        self._view.note(request, engine)
        self._world.send(request, engine)

    def first_token(self, request: SimulatedRequest, engine: int, now_s: float) -> None:
        """See SimulatedGateway."""

    def finished(self, request: SimulatedRequest, engine: int, now_s: float) -> None:
        """See SimulatedGateway."""
        self._view.in_flight[engine] -= 1

    def news(self, engine: int, events: Sequence[tuple[bool, Any]], report: Report, now_s: float) -> None:
        """See SimulatedGateway; it looks at the engines instead."""
