"""Defines `parallelism` of a role, with its rules: the GPUs and nodes over which one engine is spread. Knows no
pods.
"""

from pydantic import Field

from mini_infer_operator.resource.rules import ApiModel, Rule

_RANKS = " * ".join(f"(has(self.{size}) ? self.{size} : 1)" for size in ("tensor", "pipeline", "data"))
MOST = 64
"""The largest value of each size."""


class Parallelism(ApiModel):
    """The GPUs and nodes over which one engine is spread: tensor x pipeline x data ranks, each on a GPU of its own."""

    rules = (
        Rule(
            f"({_RANKS}) % (has(self.nodes) ? self.nodes : 1) == 0",
            "tensor x pipeline x data must be a multiple of nodes: each node runs as many ranks as the others",
            lambda p: p.ranks % (p.nodes or 1) == 0,
        ),
        Rule(
            "!has(self.expert) || !self.expert || (has(self.tensor) && self.tensor > 1)",
            "expert deals the experts of a mixture out to the ranks of tensor: set tensor above 1",
            lambda p: not p.expert or (p.tensor or 1) > 1,
        ),
    )
    tensor: int | None = Field(default=None, ge=1, le=MOST)
    """GPUs that share every layer of one engine."""
    pipeline: int | None = Field(default=None, ge=1, le=MOST)
    """Stages, each on GPUs of its own with some of the layers; stages compute different passes at the same time."""
    data: int | None = Field(default=None, ge=1, le=MOST)
    """Copies of the model behind one port."""
    expert: bool | None = None
    """True if each tensor rank has some experts of a mixture whole, instead of a slice of each."""
    nodes: int | None = Field(default=None, ge=1, le=MOST)
    """Nodes that one engine spans, with a pod on each: a group, which a LeaderWorkerSet runs."""

    @property
    def ranks(self) -> int:
        """The number of computing processes of one engine."""
        return (self.tensor or 1) * (self.pipeline or 1) * (self.data or 1)

    @property
    def ranks_per_pod(self) -> int:
        """The number of ranks in one pod, and of the GPUs that it needs."""
        return self.ranks // (self.nodes or 1)
