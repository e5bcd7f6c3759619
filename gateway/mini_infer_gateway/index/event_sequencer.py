"""Whether a batch of events is the next one, an old one, one after a gap, or a restarted sender's. Pure."""

from enum import Enum


class Verdict(Enum):
    """What to do with a batch."""

    NEXT = "apply it"
    KNOWN = "it is contained in a replay or a snapshot"
    GAP = "batches before it were lost"
    RESTARTED = "its sender began anew: nothing known of it holds"


class Sequencer:
    """Follows one sender's numbers."""

    def __init__(self) -> None:
        self._heard = -1
        """The last number on the live socket, where numbers only ever rise."""
        self.expected: int | None = None
        """The next number; None: nothing is known yet, so any will do."""

    def observe(self, sequence: int) -> Verdict:
        """Judges a number from the live socket."""
        heard, self._heard = self._heard, sequence
        if sequence <= heard:
            self.expected = None
            return Verdict.RESTARTED
        if self.expected is None or sequence == self.expected:
            return Verdict.NEXT
        return Verdict.KNOWN if sequence < self.expected else Verdict.GAP

    def applied(self, sequence: int) -> None:
        """Everything up to `sequence` is in the index now."""
        self.expected = sequence + 1
