"""How many layers of a pass have their keys and values on all ranks of a tensor-parallel group."""

from dataclasses import dataclass

from mini_infer_engine.core.kv_transfer import LayerProgress


@dataclass(slots=True)
class GroupLayers:
    """See `kv_transfer.LayerProgress`. The first rank's own progress is enough, one layer behind.

    Attention of a layer reads the sum of all ranks' parts of the layer before, and each rank adds its part after it has
    written that layer's keys and values. So where the first rank has a layer, all have the one before. After the last
    layer the ranks meet once more, at the latest in `Decoder.forward`: the end of the pass on the first rank tells it.
    """

    own: LayerProgress
    """Of the first rank."""
    num_layers: int
    has_ended: bool = False
    """The pass, on the first rank."""

    def num_done(self) -> int:
        """See `LayerProgress.num_done`."""
        return self.num_layers if self.has_ended else max(0, self.own.num_done() - 1)
