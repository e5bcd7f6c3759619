"""What a plan is: a pass to launch, and what else its launch and its commit need. Decides nothing."""

from dataclasses import dataclass, field

from mini_infer_engine.core.batch import Batch
from mini_infer_engine.core.sequence import Sequence
from mini_infer_engine.core.speculation.pass_times import PassKind


@dataclass(slots=True)
class Step:
    """A planned pass and what its commit needs."""

    batch: Batch
    sequences: list[Sequence] = field(default_factory=list)
    """Of the batch's rows, in their order."""
    pinned_pages: list[int] = field(default_factory=list)
    """Sources of the batch's copies, held until commit."""
    swapped: list[Sequence] = field(default_factory=list)
    """Sequences whose pages this pass brings to main memory."""
    admitted: list[Sequence] = field(default_factory=list)
    """Sequences that run for the first time."""
    launched_s: float = 0.0
    """Set at its launch."""
    kind: PassKind | None = None
    """Set at its launch, where tokens may be guessed."""
    receiving: list[Sequence] = field(default_factory=list)
    """Sequences that have got pages, and wait from now on for what another engine puts into them."""
    kept_out: list[Sequence] = field(default_factory=list)
    """Waiting sequences that would not fit if they were alone, for pages that only transfers use."""
