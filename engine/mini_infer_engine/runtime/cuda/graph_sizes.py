"""Decides which graphs are captured before an engine is ready, and in which order the others follow. No torch here."""

from bisect import bisect_left

SIZES_APART = 4
"""Factor between sizes that have a graph when the engine is ready. A batch is padded at most so far meanwhile."""


def sizes_at_start(sizes: list[int]) -> list[int]:
    """Returns the sizes, of these ascending ones, whose graphs are captured first: the smallest, the largest, and some
    between them that are `SIZES_APART` from each other or a little more.
    """
    chosen: list[int] = []
    for size in sizes:
        if not chosen or size >= SIZES_APART * chosen[-1] or size == sizes[-1]:
            chosen.append(size)
    return chosen


class GraphSizes:
    """Sizes of one kind of pass: those that have a graph, and those that will have one."""

    def __init__(self, sizes: list[int]) -> None:
        """`sizes` ascend. None has a graph yet."""
        self._sizes = sizes
        self._captured: list[int] = []
        self._left = list(sizes)
        self._missed: int | None = None

    def captured(self, size: int) -> None:
        """Notes that this size has a graph now."""
        self._left = [one for one in self._left if one != size]
        self._captured = [one for one in self._sizes if one not in self._left]

    def requested(self, rows: int) -> None:
        """Notes that a pass with so many rows comes, whose own size should have a graph soon."""
        if self._left and rows <= self._sizes[-1]:
            best = self._sizes[bisect_left(self._sizes, rows)]
            self._missed = best if best in self._left else self._missed

    def fitting(self, rows: int) -> int:
        """Returns the smallest size with a graph that fits so many rows; before any has one, the size that will."""
        sizes = self._captured or self._sizes
        return sizes[bisect_left(sizes, rows)]

    @property
    def missed(self) -> int | None:
        """The size that passes lacked last; None if it has a graph by now."""
        return self._missed if self._missed in self._left else None

    @property
    def left(self) -> list[int]:
        """The sizes without a graph."""
        return self._left
