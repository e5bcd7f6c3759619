"""Tells a GPU's stream when layers have been loaded: by events that each load records anew, so that a pass that waits
for them can be captured before there is any load.
"""

from collections.abc import Sequence
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

    def __init__(self, num_layers: int, places: Sequence[int] = ()) -> None:
        """Takes the layers of a page, and the place there of each layer of the model; none if that is the layer itself.
        Nothing is being loaded.
        """
        size = -(-num_layers // _MOST_GROUPS)
        self.groups = [(first, min(first + size, num_layers)) for first in range(0, num_layers, size)]
        """The first layer of each group, and the one after its last."""
        self._awaited = groups_to_await([place // size for place in places or range(num_layers)])
        # In a graph, only such an event refers to what was recorded outside.
        self._events: list[Any] = [torch.cuda.Event(external=True) for _ in self.groups]  # type: ignore[no-untyped-call]  # torch's
        for group in range(len(self.groups)):
            self.copied(group)

    def copied(self, group: int) -> None:
        """Has passes that wait for this group go on once the current stream has done what it has been given."""
        self._events[group].record()

    def wait_for_layer(self, layer: int) -> None:
        """Has the current stream wait for this layer of the loads that have begun. A pass attends in order, so that
        only the first layer that reads a group, or a later one than those before it, waits.
        """
        if (group := self._awaited.get(layer)) is not None:
            self._events[group].wait()


def groups_to_await(groups: Sequence[int]) -> dict[int, int]:
    """Returns the layers that wait in a pass whose layers attend in order, and the group that each waits for. `groups`
    are those that the layers read, which are copied in ascending order.
    """
    awaited: dict[int, int] = {}
    newest = -1
    for layer, group in enumerate(groups):
        if group > newest:
            awaited[layer] = newest = group
    return awaited
