"""Chooses which sequences decode in the next pass, where a pipeline's stages keep several passes in flight at once.

A decode row's token is sampled by the last stage, long after the first one could have begun the next pass. So sequences
take turns: each decodes in every P-th pass of P stages, and passes have as equal numbers of them as possible. With too
few sequences for that, a pass depends on the one before it: its first stage waits for the token, which gets there
sooner than through the host. It knows neither pages nor budgets.
"""

from collections import deque

from mini_infer_engine.core.sequence import Sequence
from mini_infer_engine.core.step import Step


class NoPipelineTurns:
    """Stands in for `PipelineSchedule` where one pass at a time samples: every sequence may be in every pass."""

    def launched(self, step: Step) -> None:
        """Records nothing."""

    def ended(self, step: Step) -> None:
        """Records nothing."""

    def take(self, running: list[Sequence]) -> list[Sequence]:
        """Returns a copy of the running sequences: the caller may preempt some while it goes through them."""
        return running.copy()


class PipelineSchedule:
    """The turns of one scheduler's sequences."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._num_launched = 0
        self._in_flight: deque[tuple[int, Step]] = deque()
        """Number and plan of each launched pass that is not committed."""

    def launched(self, step: Step) -> None:
        """Records that the pass is launched."""
        self._in_flight.append((self._num_launched, step))
        self._num_launched += 1

    def ended(self, step: Step) -> None:
        """Records that the pass is committed, or has failed."""
        self._in_flight = deque(pair for pair in self._in_flight if pair[1] is not step)

    def take(self, running: list[Sequence]) -> list[Sequence]:
        """Returns the running sequences that the next pass may have, in order: all that prefill, and some others."""
        resting = self._resting()
        decoding = [one for one in running if one.num_prefill <= one.num_computed <= one.last_position]
        most = -(-len(decoding) // self._num_stages)
        ready = [one for one in decoding if one not in resting][:most]
        if not ready and len(decoding) == len(running) and len(self._in_flight) < self._num_stages:
            ready = [one for one in decoding if _may_follow_itself(one)][:most]
        chosen = set(ready)
        return [one for one in running if one in chosen or one.num_computed < one.num_prefill]

    def _resting(self) -> set[Sequence]:
        """Returns the sequences whose newest token the first stage cannot have when it begins the next pass."""
        first = self._num_launched - self._num_stages + 1
        return {
            sequence
            for number, step in self._in_flight
            if number >= first
            for row, sequence in zip(step.batch.rows, step.sequences, strict=True)
            if row.sampling is not None
        }


def _may_follow_itself(sequence: Sequence) -> bool:
    """True if a row may be planned while one token before it is unknown: masks need all tokens, bans all but one."""
    return sequence.in_flight <= 1 and sequence.matcher is None
