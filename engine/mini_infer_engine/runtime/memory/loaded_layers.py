"""Tells a GPU's stream when layers have been loaded: by events that each load records anew, so that a pass that waits
for them can be captured before there is any load.
"""

from typing import Any

import torch

_MOST_GROUPS = 6
"""Most groups of layers that a load copies one after another: each takes the host some 60 us, during which the pass is
not launched.
"""


class LoadedLayers:
    """The `LayerwiseLoad` of all loads of an engine, which one stream copies one after another.

    A pass that follows a load is launched after it has begun; should a later one have begun, the pass waits for its
    layers as well.
    """

    def __init__(self, num_layers: int) -> None:
        """Takes the layers of a page. Nothing is being loaded."""
        self._num_layers, size = num_layers, -(-num_layers // _MOST_GROUPS)
        self.groups = [(first, min(first + size, num_layers)) for first in range(0, num_layers, size)]
        """The first layer of each group, and the one after its last."""
        self._size = size
        # In a graph, only such an event refers to what was recorded outside.
        self._events: list[Any] = [torch.cuda.Event(external=True) for _ in self.groups]  # type: ignore[no-untyped-call]
        for group in range(len(self.groups)):
            self.copied(group)

    def copied(self, group: int) -> None:
        """Has passes that wait for this group go on once the current stream has done what it has been given."""
        self._events[group].record()

    def wait_for_layer(self, layer: int) -> None:
        """Has the current stream wait for this layer of the loads that have begun, and all before it. A pass attends
        in order, so that only the first layer of a group waits.
        """
        if layer % self._size == 0:
            self._events[layer // self._size].wait()
