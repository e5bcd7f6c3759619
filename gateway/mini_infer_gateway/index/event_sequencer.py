"""Classifies a batch of events: the next one, an old one, one after a gap, or the first of a restarted sender. Pure."""

from enum import Enum


class Verdict(Enum):
    """The treatment of a batch."""

    NEXT = "apply it"
    ALREADY_APPLIED = "it is contained in a replay or a snapshot"
    GAP = "batches before it were lost"
    RESTARTED = "its sender began anew: nothing known of it holds"


class Sequencer:
    """Follows the sequence numbers of one sender."""

    def __init__(self) -> None:
        self._last_sequence = -1
        """The last number on the live socket, where numbers only increase."""
        self.expected: int | None = None
        """The next number; None if nothing is known yet, so that any number is accepted."""

    def observe(self, sequence: int) -> Verdict:
        """Returns the verdict for a number from the live socket."""
        last, self._last_sequence = self._last_sequence, sequence
        if sequence <= last:
            self.expected = None
            return Verdict.RESTARTED
        if self.expected is None or sequence == self.expected:
            return Verdict.NEXT
        return Verdict.ALREADY_APPLIED if sequence < self.expected else Verdict.GAP

    def applied(self, sequence: int) -> None:
        """Records that everything up to `sequence` is in the index now."""
        self.expected = sequence + 1
