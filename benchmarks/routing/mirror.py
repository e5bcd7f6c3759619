"""Real engines as one who sends them everything knows them: what reference policies look at where nothing is modelled.

The policies then have what llm-d's and Dynamo's documents give theirs, without any delay: requests that wait (no token
has come) and that run, prompt tokens still to be computed, cached blocks (an LRU list of what was sent there).
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.routing.workload import SimulatedRequest


@dataclass(frozen=True, slots=True)
class MirroredShape:
    """Of one engine."""

    kv_blocks: int
    block_tokens: int


@dataclass(slots=True, eq=False)
class Flight:
    """A request at an engine."""

    request: SimulatedRequest
    expected_cached: int
    """Prompt tokens that were taken for cached when it was sent."""

    @property
    def known_tokens(self) -> int:
        """Of its prompt."""
        return self.request.prompt_tokens


class MirroredEngine:
    """One of them; has what policies ask of an EngineModel."""

    def __init__(self, shape: MirroredShape) -> None:
        self.shape = shape
        self.waiting: list[Flight] = []
        self.running: list[Flight] = []
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def free_pages(self) -> int:
        """Blocks that no running request holds; cached ones can be evicted."""
        return self.shape.kv_blocks - sum(len(flight.request.blocks) for flight in self.running)

    def match_blocks(self, request: SimulatedRequest) -> int:
        """Leading blocks of the prompt that are cached."""
        count = 0
        for block in request.blocks[: (request.prompt_tokens - 1) // self.shape.block_tokens]:
            if block not in self._cached:
                break
            count += 1
        return count

    def queued_tokens(self) -> int:
        """Prompt tokens still to be computed."""
        return sum(flight.known_tokens - flight.expected_cached for flight in self.waiting)

    def sent(self, request: SimulatedRequest) -> Flight:
        """A request goes there."""
        flight = Flight(request, self.match_blocks(request) * self.shape.block_tokens)
        self.waiting.append(flight)
        return flight

    def first_token(self, flight: Flight) -> None:
        """Its prompt is computed, and cached."""
        self.waiting.remove(flight)
        self.running.append(flight)
        for block in reversed(flight.request.blocks):  # the end of a prefix is the first to be evicted
            self._cached[block] = None
            self._cached.move_to_end(block)
        while len(self._cached) > self.shape.kv_blocks:
            self._cached.popitem(last=False)

    def finished(self, flight: Flight) -> None:
        """However it ended."""
        for where in (self.waiting, self.running):
            if flight in where:
                where.remove(flight)


@dataclass(frozen=True, slots=True)
class MirroredFleet:
    """What `references.base.View` is made of."""

    shape: MirroredShape
    engines: Sequence[MirroredEngine]

    @property
    def serving(self) -> Sequence[bool]:
        """All of them serve."""
        return [True] * len(self.engines)
