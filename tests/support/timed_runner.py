"""A runner without a model that takes the time of one, by a clock of its own: a host that launches, a device behind it.

A launch costs the host time and queues the device's; who collects waits for the device. So what an engine with a pass
ahead hides, it hides here too. Guesses are right by chance, at a set rate.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mini_infer_engine.config.model.kv_groups import UNIFORM
from mini_infer_engine.core.batch import NO_SWAP, Batch, TokenMasks
from mini_infer_engine.core.request import Request
from mini_infer_engine.core.result import PassResult
from mini_infer_engine.core.speculation.pass_times import GuessCosts


@dataclass(frozen=True)
class Machine:
    """Microseconds that passes take, by rows."""

    plain: Callable[[int], float]
    """Of the device, for one token each."""
    check: Callable[[int, int], float]
    """Of the device, for rows and guesses: the check of all of them."""
    guess: float
    """Of the device, for a guess of all rows."""
    host: Callable[[int], float]
    """To plan, launch and commit a pass."""
    guessing_host: float
    """More, where it has guesses."""
    reading_host: float = 0.0
    """To launch a draft's reading of text."""
    reading: float = 0.0
    """Of the device, for a token that a draft reads."""
    cold: float = 0.0
    """More for each of the first passes of a number of rows and guesses."""


@dataclass
class Clock:
    """Microseconds of the host, and until when the device is busy."""

    host: float = 0.0
    device: float = 0.0

    def seconds(self) -> float:
        """The time, for who asks."""
        return self.host * 1e-6


@dataclass
class TimedRunner:
    """See the module; of unlimited memory."""

    machine: Machine
    acceptance: float = 0.0
    max_speculative_rows: int = 128
    num_pages: int = 8192
    page_size: int = 256
    measures: bool = True
    """Whether passes were timed, and so warmed up, before the first request."""
    clock: Clock = field(default_factory=Clock)
    dice: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        self.kv_cache, self.swap_space = UNIFORM, NO_SWAP
        self.eviction_obstacle = None
        self.host_memory = None
        self.num_guessing_passes = 0
        self._seen: dict[tuple[int, int], int] = {}
        self.guess_costs = self._measured() if self.measures else GuessCosts()

    def _measured(self) -> GuessCosts:
        machine = self.machine
        pass_s = {
            (rows, drafts): 1e-6 * (machine.check(rows, drafts) + drafts * machine.guess)
            for rows in (1, 2, 4, 8, 16, 32, 64, 128)
            for drafts in (1, 3, 5)
        }
        if not machine.reading_host:
            return GuessCosts(pass_s)
        reading = [(tokens, 1e-6 * (machine.reading_host + tokens * machine.reading)) for tokens in (16, 1024)]
        return GuessCosts(pass_s, tuple(reading))

    def refuses(self, request: Request) -> str | None:
        """Nothing."""

    def launch(self, batch: Batch) -> tuple[PassResult, float]:
        """What it will have made, and when."""
        machine, rows, drafts = self.machine, len(batch.rows), batch.num_drafts
        if batch.num_decodes < rows:
            self.clock.host += 150
            cost = 300 + machine.plain(rows)
        else:
            seen = self._seen.get((rows, drafts), 0)
            self._seen[rows, drafts] = seen + 1
            self.clock.host += machine.host(rows) * 0.7 + (machine.guessing_host if drafts else 0)
            self.clock.host += machine.cold if seen < (1 if drafts and self.measures else 6) else 0
            cost = machine.plain(rows) if not drafts else machine.check(rows, drafts) + drafts * machine.guess
            self.num_guessing_passes += drafts > 0
        num_read = sum(row.count for row in batch.catch_up)
        if num_read and machine.reading_host:
            self.clock.host += machine.reading_host
            cost += num_read * machine.reading
        cost *= 1 + 0.03 * self.dice.random()
        self.clock.device = max(self.clock.device, self.clock.host) + cost
        return PassResult([self._tokens(row.num_drafts or 0) for row in batch.rows]), self.clock.device

    def _tokens(self, drafts: int) -> Sequence[int]:
        made = 1
        while made <= drafts and self.dice.random() < self.acceptance:
            made += 1
        return (7,) * made

    def guesses(self, handle: Any) -> Mapping[int, Sequence[int]]:
        """None is asked for."""
        raise NotImplementedError(handle)

    def sample(self, handle: Any, masks: TokenMasks) -> None:
        """No pass waits for masks."""
        raise NotImplementedError(handle, masks)

    def collect(self, handle: tuple[PassResult, float]) -> PassResult:
        """Wait for the device."""
        result, end = handle
        self.clock.host = max(self.clock.host, end) + self.machine.host(len(result.tokens)) * 0.3
        return result
