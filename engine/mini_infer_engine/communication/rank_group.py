"""Defines a rank's group for model loading: the communication between ranks, and the values on which all must agree."""

from typing import Protocol

from mini_infer_engine.communication.collectives import NO_COLLECTIVES, Collectives
from mini_infer_engine.communication.stage_link import NO_LINK, StageLink


class RankGroup(Protocol):
    """The processes that share one model."""

    collectives: Collectives
    """Collectives with the ranks that have other parts of the same layers."""
    link: StageLink
    """Link to the ranks that have other layers."""
    rank: int
    size: int
    """This rank among all, and the number of them."""

    def begin_together(self) -> None:
        """Waits until every rank has its weights. From then on all ranks run the same operations at the same time."""

    def smallest(self, number: int) -> int:
        """Returns the smallest of one number from each rank."""

    def of_first(self, text: str) -> str:
        """Returns the first rank's text. Every rank calls it at the same point."""

    def share_of(self, total: int) -> int:
        """Returns this rank's share of main memory that all ranks of a machine have together."""


class AloneInGroup:
    """A group of one process that has the whole model."""

    collectives: Collectives = NO_COLLECTIVES
    link: StageLink = NO_LINK
    rank, size = 0, 1

    def begin_together(self) -> None:
        """Returns at once."""

    def smallest(self, number: int) -> int:
        """Returns the number itself."""
        return number

    def of_first(self, text: str) -> str:
        """Returns the text itself."""
        return text

    def share_of(self, total: int) -> int:
        """Returns the whole of it."""
        return total


ALONE_IN_GROUP = AloneInGroup()
