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

    @property
    def is_load(self) -> bool:
        """True if something is to be loaded."""
        return bool(self.pages) or self.state is not None


NO_MATCH = TierMatch()
