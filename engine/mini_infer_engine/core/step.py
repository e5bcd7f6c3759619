"""Defines a plan: a pass to launch, and the data for its launch and its commit. Decides nothing."""

from dataclasses import dataclass, field

from mini_infer_engine.core.batch import Batch
from mini_infer_engine.core.kv_tiers.tier_match import TierMatch
from mini_infer_engine.core.sequence import Sequence
from mini_infer_engine.core.speculation.pass_times import PassKind


@dataclass(frozen=True, slots=True)
class Refusal:
    """The decision that a request's latency targets cannot be met."""

    reason: str
    """Message for the client. It names the target, the expected delay and the remedy."""
    retry_after_s: float
    """Seconds after which the same request could be served in time, if nothing else arrives."""


@dataclass(slots=True, eq=False)
class Step:
    """A planned pass, with the data that its commit needs."""

    batch: Batch
    sequences: list[Sequence] = field(default_factory=list)
    """The sequences of the batch's rows, in their order."""
    pinned_pages: list[int] = field(default_factory=list)
    """Sources of the batch's copies, pinned until commit."""
    swapped: list[Sequence] = field(default_factory=list)
    """Sequences whose pages this pass copies to main memory."""
    resumed: list[Sequence] = field(default_factory=list)
    """The sequence of each page in the batch's `swap_in`, and of each state in its `states_in` after them."""
    admitted: list[Sequence] = field(default_factory=list)
    """Sequences that run for the first time."""
    launched_s: float = 0.0
    """Monotonic time of its launch, set then."""
    launch_took_s: float = 0.0
    """Seconds that the launch took, set then. A runner that computes the pass in its launch takes them all."""
    kind: PassKind | None = None
    """Kind of the pass, set at its launch if tokens may be drafted."""
    receiving: list[Sequence] = field(default_factory=list)
    """Sequences that have been given pages, and from now on wait for another engine to fill them."""
    compacting: list[Sequence] = field(default_factory=list)
    """Sequences that lose cached tokens at the end of this pass."""
    loading: list[tuple[Sequence, TierMatch]] = field(default_factory=list)
    """Sequences that have been given pages, and from now on wait for their cached blocks from a lower tier."""
    loading_layerwise: list[Sequence] = field(default_factory=list)
    """The sequence of each of the batch's `layerwise_loads`."""
    refused: list[tuple[Sequence, Refusal]] = field(default_factory=list)
    """Sequences that waited, and whose targets cannot be met any more. They are in no queue."""
    kept_out: list[Sequence] = field(default_factory=list)
    """Waiting sequences that would not fit even alone, because of pages that only transfers use."""
