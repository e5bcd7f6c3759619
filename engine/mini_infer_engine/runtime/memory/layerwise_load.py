"""Loads pages from main memory into a pool on a CPU layer by layer, for a pass that computes meanwhile.

A page has its layers one after another, so that a layer's part of several pages is a rectangle of words.
"""

from collections.abc import Iterator, Sequence
from threading import Condition

import numpy as np

from mini_infer_engine.core.kv_tiers.tier_memory import PageMove

_ALL_LAYERS = 1 << 62


class CopiedLayers:
    """The `LayerwiseLoad` of a thread that copies. The pass waits in another one."""

    def __init__(self, places: Sequence[int] = ()) -> None:
        """Takes the place of each layer in its pages; none if that is the layer itself."""
        self._count, self._places = 0, places
        self._changed = Condition()

    def wait_for_layer(self, layer: int) -> None:
        """Waits until this layer of all pages has been copied, or the copy has ended without it."""
        place = self._places[layer] if self._places else layer
        if self._count <= place:  # a count only grows: what is there needs no lock
            with self._changed:
                self._changed.wait_for(lambda: self._count > place)

    def copied(self, count: int) -> None:
        """Lets the pass read the first `count` layers of each page."""
        with self._changed:
            self._count = count
            self._changed.notify_all()

    def end(self) -> None:
        """Lets the pass go on, whatever has been copied."""
        self.copied(_ALL_LAYERS)


def copy_layers(
    source: np.ndarray,  # [pages of main memory, words] uint64
    target: np.ndarray,  # [pages of the pool, words] uint64
    moves: Sequence[PageMove],
    num_layers: int,
    layers: CopiedLayers,
) -> None:
    """Copies pages, the first layer of all of them first."""
    rectangles, width = list(_rectangles(moves)), source.shape[1] // num_layers
    for layer in range(num_layers):
        columns = slice(layer * width, (layer + 1) * width)
        for rows, other_rows in rectangles:
            np.copyto(target[other_rows, columns], source[rows, columns])
        layers.copied(layer + 1)


def _rectangles(moves: Sequence[PageMove]) -> Iterator[tuple[slice, slice]]:
    """Yields the sources and targets of runs of moves in which both are consecutive pages."""
    begin = 0
    for end in range(1, len(moves) + 1):
        first = moves[begin]
        if end == len(moves) or moves[end] != (first.source + end - begin, first.target + end - begin):
            count = end - begin
            yield slice(first.source, first.source + count), slice(first.target, first.target + count)
            begin = end
