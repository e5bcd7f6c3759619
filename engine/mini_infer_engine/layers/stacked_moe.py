"""Describes a mixture whose checkpoint stores each projection of all experts as one tensor, as gpt-oss's does.

The checkpoint's gate and up projections alternate row by row; here the gate's rows come first, as in every mixture.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from mini_infer_engine.config.parallelism.tensor_parallel import ALONE, Shard, TensorParallel
from mini_infer_engine.layers.moe import MoESpec, SparseMoE
from mini_infer_engine.layers.placement import Part, Placement

MX_GROUP = 32
"""Columns that share a scale (OCP Microscaling Formats 1.0, section 5.2)."""


class StackedMoE(SparseMoE):
    """A mixture with biases, read from one tensor for all experts of a projection.

    `expand_mx_stacks` adds the memory that an MXFP4 checkpoint fills: 4-bit floats (E2M1), two a byte, and an E8M0
    scale for each group of columns.
    """

    gate_up_values: nn.Parameter  # [experts, 2 * width, hidden / 2] uint8
    gate_up_scales: nn.Parameter  # [experts, 2 * width, hidden / 32] uint8
    down_values: nn.Parameter  # [experts, hidden, width / 2] uint8
    down_scales: nn.Parameter  # [experts, hidden, width / 32] uint8

    def __init__(self, spec: MoESpec, parallel: TensorParallel = ALONE) -> None:
        super().__init__(spec, parallel)
        self.loads_mx_stacks = False
        self._adds_bias = parallel.whole_experts or parallel.rank == 0

    def checkpoint_tensors(self, path: str) -> dict[str, Placement]:
        """Maps the tensors of all experts to the stacks and their biases."""
        spec, name = self.spec, f"{path}.experts"
        experts, hidden, width = spec.num_experts, spec.hidden_size, spec.intermediate_size
        assert self.gate_up_bias is not None
        assert self.down_bias is not None
        biases = {
            f"{name}.gate_up_proj_bias": self._placement(self.gate_up_bias, (experts, 2 * width), 1, _gate_first),
            f"{name}.down_proj_bias": self._placement(
                self.down_bias, (experts, hidden), None, None if self._adds_bias else torch.zeros_like
            ),
        }
        if self.loads_mx_stacks:
            groups, groups_of_width = hidden // MX_GROUP, width // MX_GROUP
            blocks = (experts, 2 * width, groups, MX_GROUP // 2)
            down_blocks = (experts, hidden, groups_of_width, MX_GROUP // 2)
            return biases | {
                f"{name}.gate_up_proj_blocks": self._placement(self.gate_up_values, blocks, 1, _gate_first_of_blocks),
                f"{name}.gate_up_proj_scales": self._placement(self.gate_up_scales, blocks[:3], 1, _gate_first),
                f"{name}.down_proj_blocks": self._placement(self.down_values, down_blocks, 2, _joined_blocks),
                f"{name}.down_proj_scales": self._placement(self.down_scales, down_blocks[:3], 2),
            }
        if not self.gate_up_proj.numel():
            return biases  # rounded after loading, or loaded already
        return biases | {
            f"{name}.gate_up_proj": self._placement(
                self.gate_up_proj, (experts, hidden, 2 * width), 2, _gate_first_of_columns
            ),
            f"{name}.down_proj": self._placement(
                self.down_proj, (experts, width, hidden), 1, partial(torch.transpose, dim0=1, dim1=2)
            ),
        }

    def _placement(
        self,
        target: Tensor,
        shape: tuple[int, ...],
        width_dim: int | None,
        expand: Callable[[Tensor], Tensor] | None = None,
    ) -> Placement:
        """Returns the placement of a tensor of all experts, whose dimension `width_dim` is shared like their width."""
        part = None
        if len(self.local_experts) < shape[0]:
            part = Part(0, Shard(shape[0], ((self.local_experts.start, self.local_experts.stop),)))
        elif width_dim is not None and self.share.count < self.share.total:
            total = shape[width_dim]
            ranges = tuple((a * total // self.share.total, b * total // self.share.total) for a, b in self.share.ranges)
            part = Part(width_dim, Shard(total, ranges))
        return Placement(target, (shape,), expand, part)


def expand_mx_stacks(moe: StackedMoE) -> None:
    """Replaces the mixture's stacks by memory for MXFP4. Call it before loading.

    Raises:
        ValueError: groups of columns do not divide a rank's share of the experts.
    """
    width, hidden = moe.share.count, moe.spec.hidden_size
    if width % MX_GROUP or hidden % MX_GROUP:
        raise ValueError(f"{width} of the experts' width and {hidden} columns are not made of groups of {MX_GROUP}")
    experts = len(moe.local_experts)
    moe.gate_up_values = _bytes(experts, 2 * width, hidden // 2)
    moe.gate_up_scales = _bytes(experts, 2 * width, hidden // MX_GROUP)
    moe.down_values = _bytes(experts, hidden, width // 2)
    moe.down_scales = _bytes(experts, hidden, width // MX_GROUP)
    moe.loads_mx_stacks = True


def _bytes(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.uint8), requires_grad=False)


def _gate_first(alternating: Tensor) -> Tensor:
    """Orders rows [experts, 2 * width, ...], where gate and up alternate."""
    return torch.cat((alternating[:, ::2], alternating[:, 1::2]), dim=1)


def _gate_first_of_columns(columns: Tensor) -> Tensor:
    return _gate_first(columns.transpose(1, 2))


def _gate_first_of_blocks(blocks: Tensor) -> Tensor:
    return _gate_first(_joined_blocks(blocks))


def _joined_blocks(blocks: Tensor) -> Tensor:
    """Joins the blocks [experts, rows, groups, 16] of a row."""
    return blocks.flatten(2)
