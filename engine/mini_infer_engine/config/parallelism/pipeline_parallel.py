"""Splits layers among the stages of a pipeline, after GPipe (Huang et al. 2019, arXiv 1811.06965). No torch here.

A pass goes through the stages one after the other; while one computes it, those before compute the passes that follow.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One rank's place among the stages of its group; models are built with it, through their config."""

    index: int = 0
    size: int = 1
    """Stages of the group."""
    layers: range | None = None
    """The layers of the whole model that this stage has; None if not known yet, or all of them."""

    @property
    def is_first(self) -> bool:
        """True if this stage looks embeddings up."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True if this stage has the last norm and the head, and samples."""
        return self.index == self.size - 1


WHOLE = PipelineStage()


def split_layers(num_layers: int, num_stages: int, head_layers: float) -> list[range]:
    """Returns the layers of each stage, in order.

    All stages take as long as each other, as far as whole layers allow: the last one has fewer, because it also has the
    head, which takes as long as `head_layers` layers. If the others cannot have equally many, the later ones have one
    more: the first also looks embeddings up.

    Raises ValueError if there are more stages than layers.
    """
    if num_stages > num_layers:
        raise ValueError(
            f"{num_layers} layers cannot be split among {num_stages} stages: choose a smaller --pipeline-parallel-size"
        )
    if num_stages == 1:
        return [range(num_layers)]
    fair = (num_layers + head_layers) / num_stages
    last = min(max(1, round(fair - head_layers)), num_layers - num_stages + 1)
    share, more = divmod(num_layers - last, num_stages - 1)
    sizes = [share + (stage >= num_stages - 1 - more) for stage in range(num_stages - 1)] + [last]
    ends = [sum(sizes[: stage + 1]) for stage in range(num_stages)]
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
