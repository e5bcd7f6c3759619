"""Counts the layers of a pass whose keys and values are in the page pools of all ranks of a tensor-parallel group."""

from dataclasses import dataclass

from mini_infer_engine.core.kv_transfer import LayerProgress


@dataclass(slots=True)
class GroupLayers:
    """Implements `kv_transfer.LayerProgress` for a group: the first rank's own progress is enough, one layer behind.

    Attention of a layer reads the sum of all ranks' parts of the previous layer, and each rank adds its part after it
    has written that layer's keys and values. Therefore, if the first rank has a layer, all ranks have the one before
    it. After the last layer the ranks meet once more, at the latest in `Decoder.forward`, so the end of the pass on the
    first rank completes that layer.
    """

    own: LayerProgress
    """Progress of the first rank."""
    num_layers: int
    has_ended: bool = False
    """True once the pass has ended on the first rank."""

    def num_done(self) -> int:
        """Returns the number of layers that all ranks have computed."""
        return self.num_layers if self.has_ended else max(0, self.own.num_done() - 1)
