"""A rank's group as loading sees it: what it computes together with the others, and what all of them must agree on."""

from typing import Protocol

from mini_infer_engine.communication.collectives import NO_COLLECTIVES, Collectives
from mini_infer_engine.communication.stage_link import NO_LINK, StageLink


class RankGroup(Protocol):
    """The processes that share one model."""

    collectives: Collectives
    """With those that have other parts of the same layers."""
    link: StageLink
    """With those that have other layers."""

    def begin_together(self) -> None:
        """Wait until every rank has its weights; from then on all ranks do the same at the same time."""

    def smallest(self, number: int) -> int:
        """The least of one number from each rank."""

    def share_of(self, total: int) -> int:
        """Of main memory that all ranks of a machine have together."""


class AloneInGroup:
    """One process has the whole model."""

    collectives: Collectives = NO_COLLECTIVES
    link: StageLink = NO_LINK

    def begin_together(self) -> None:
        """See `RankGroup.begin_together`: there is nobody else."""

    def smallest(self, number: int) -> int:
        """See `RankGroup.smallest`."""
        return number

    def share_of(self, total: int) -> int:
        """See `RankGroup.share_of`."""
        return total


ALONE_IN_GROUP = AloneInGroup()
