"""Defines with what a waiting sequence's prefix continues in lower tiers."""

from dataclasses import dataclass

from mini_infer_engine.core.kv_tiers.loads import TierPage, TierState
from mini_infer_engine.core.prefix_cache import Hit


@dataclass(frozen=True, slots=True)
class TierMatch:
    """The pages of lower tiers with which a waiting sequence's prefix continues."""

    pages: tuple[TierPage, ...] = ()
    """The blocks that are worth loading."""
    is_awaited: bool = False
    """True if the first of them is on its way to the device, where this sequence will hit it soon."""
    hit: Hit | None = None
    """The whole pages before them, which are on the device; None if nothing is loaded."""
    state: TierState | None = None
    """The recurrent state after the last of them, without which they are of no use; None if the model has none."""

    places: tuple[tuple[int, int], ...] = ()
    """The KV group and the place in its page table of each of the pages, where a model has several groups or windows;
    empty if they follow the hit. All of them are needed then.
    """
    num_pages: int = 0
    """Whole pages of the prefix once everything is loaded, where there are `places`."""

    @property
    def is_load(self) -> bool:
        """True if something is to be loaded."""
        return bool(self.pages) or self.state is not None

    @property
    def needs_all(self) -> bool:
        """True if the sequence can go on from all of it alone: from a state, or from the pages of all KV groups."""
        return self.state is not None or bool(self.places)


NO_MATCH = TierMatch()
