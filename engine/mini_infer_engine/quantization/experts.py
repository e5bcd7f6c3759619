"""Stores quantised experts as stacks of `GroupedWeight`, read from a quantised checkpoint or rounded after loading.

A quantised checkpoint stores each projection of each expert like any other linear layer. A mixture therefore has one
such layer for each of them until loading is complete; then they are joined into the stacks. Routers are never
quantised. On a CPU an expert is dequantised each time it computes.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from mini_infer_engine.kernels.gemm.grouped_weight import (
    GroupedWeight,
    dequantized_groups,
    ordered_for_mx_experts,
    rows_joined,
    stacked,
)
from mini_infer_engine.layers.grouped import multiplies_groups, multiplies_mx_in_registers
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.moe import ExpertLayers, SparseMoE
from mini_infer_engine.layers.stacked_moe import MX_GROUP, StackedMoE
from mini_infer_engine.quantization.gguf_blocks import in_one_form
from mini_infer_engine.quantization.row_maxima import OverRanks, as_here


class _ReadsGroups(Protocol):
    def grouped(self, layer: Linear) -> GroupedWeight | None:
        """Returns the loaded weight in the form that kernels read, or None if there is no such form."""


class _Stack(nn.Module):
    """One of a mixture's two weight stacks. Its tensors are parameters, so that their bytes are counted."""

    def __init__(self, weight: GroupedWeight) -> None:
        super().__init__()
        self._weight = weight
        for name in ("values", "scales", "zeros", "factors"):
            if (tensor := getattr(weight, name)) is not None:
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def weight(self) -> GroupedWeight:
        """Returns the stack of all experts."""
        return self._weight


class QuantizedExperts:
    """Implements `layers.moe.StoredExperts` up to the source of the weights, which the subclasses add."""

    def __init__(self) -> None:
        self._stacks: tuple[_Stack, ...] = ()
        self.dtype = torch.get_default_dtype()
        """The model's dtype: the default dtype at the time of construction."""

    def weights(self) -> tuple[GroupedWeight, GroupedWeight]:
        """Returns the stacks of the gate and up projections, and of the down projection."""
        gate_up, down = self._stacks
        return gate_up.weight(), down.weight()

    def keep(self, moe: SparseMoE, gate_up: GroupedWeight, down: GroupedWeight) -> None:
        """Makes these stacks the mixture's weights. On a GPU whose kernels cannot read them they are dequantised."""
        device = gate_up.values.device
        if device.type == "cuda" and not multiplies_groups(device, gate_up.kind):
            moe.stored = None
            both = (dequantized_groups(weight).to(self.dtype) for weight in (gate_up, down))
            moe.gate_up_proj, moe.down_proj = (nn.Parameter(weight, requires_grad=False) for weight in both)
            return
        if self.dtype == torch.bfloat16 and multiplies_mx_in_registers(device):
            ordered = ordered_for_mx_experts(gate_up), ordered_for_mx_experts(down)
            if ordered[0].kind == ordered[1].kind:  # one kernel or the other computes both
                gate_up, down = ordered
        self._stacks = _Stack(gate_up), _Stack(down)
        for name, stack in zip(("gate_up_stack", "down_stack"), self._stacks, strict=True):
            moe.add_module(name, stack)


class CheckpointExperts(QuantizedExperts):
    """Experts of a quantised checkpoint."""

    def process_weights_after_loading(self, moe: SparseMoE) -> None:
        """Joins the layers of all experts into the two stacks, the shared experts last, and deletes the layers."""
        if self._stacks:
            return
        layers = [cast("ExpertLayers", layers) for layers in cast("nn.ModuleDict", moe.experts).values()]
        gate_up = [_grouped(each.gate_up_proj) for each in layers]
        down = [_grouped(each.down_proj) for each in layers]
        if moe.spec.num_shared:
            assert moe.shared_experts is not None, "`expand_experts` makes them"
            more_gate_up, more_down = _shared(moe.shared_experts, moe.spec.num_shared)
            gate_up += more_gate_up
            down += more_down
            moe.shared_experts = None
        self.keep(moe, stacked(in_one_form(gate_up)), stacked(in_one_form(down)))
        del moe.experts


class MxExperts(QuantizedExperts):
    """Experts of a checkpoint that stores each projection of all experts as one MXFP4 tensor."""

    def process_weights_after_loading(self, moe: SparseMoE) -> None:
        """Makes the loaded tensors the two stacks: they are in the form that kernels read."""
        assert isinstance(moe, StackedMoE)
        if not moe.loads_mx_stacks:
            return
        hidden, width = moe.spec.hidden_size, moe.share.count
        gate_up = GroupedWeight("fp4", moe.gate_up_values.data, moe.gate_up_scales.data, hidden, MX_GROUP)
        down = GroupedWeight("fp4", moe.down_values.data, moe.down_scales.data, width, MX_GROUP)
        for name in ("gate_up_values", "gate_up_scales", "down_values", "down_scales"):
            delattr(moe, name)
        moe.loads_mx_stacks = False
        self.keep(moe, gate_up, down)


def expand_experts(moe: SparseMoE) -> None:
    """Replaces the mixture's stacks by the layers that a quantised checkpoint fills. Call it before loading."""
    spec, hidden = moe.spec, moe.spec.hidden_size
    moe.stored = CheckpointExperts()
    give_up_stacks(moe)
    first, last = moe.local_experts.start, min(moe.local_experts.stop, spec.num_experts)
    splits_width = moe.share.count < moe.share.total
    experts = [ExpertLayers(hidden, moe.share, is_summed=splits_width) for _ in range(first, last)]
    by_name = nn.ModuleDict({str(number): layers for number, layers in enumerate(experts, first)})
    moe.add_module("experts", by_name)
    if spec.num_shared:
        moe.shared_experts = ExpertLayers(hidden, moe.shared_share, is_summed=moe.is_summed)


class RoundedExperts(QuantizedExperts):
    """Experts of an unquantised checkpoint, rounded after loading by `rounding`, which takes weights [experts, rows,
    columns].
    """

    def __init__(self, rounding: Callable[[Tensor, OverRanks], GroupedWeight]) -> None:
        super().__init__()
        self._rounding = rounding
        self.over_ranks: OverRanks = as_here
        """Reduces row maxima over ranks if ranks share out the width of every expert, so that scales are those of whole
        rows.
        """

    def process_weights_after_loading(self, moe: SparseMoE) -> None:
        """Rounds both stacks once, and frees the weights in the model's dtype."""
        if self._stacks or not moe.gate_up_proj.numel():
            return
        made = self._rounding(moe.gate_up_proj, as_here), self._rounding(moe.down_proj, self.over_ranks)
        give_up_stacks(moe)
        self.keep(moe, *made)


def give_up_stacks(moe: SparseMoE) -> None:
    """Frees the memory of the stacks in the model's dtype."""
    for name in ("gate_up_proj", "down_proj"):
        setattr(moe, name, nn.Parameter(getattr(moe, name).new_empty(0), requires_grad=False))


def _grouped(layer: Linear) -> GroupedWeight:
    weight = cast("_ReadsGroups", layer.method).grouped(layer)
    assert weight is not None, "of one part, or of parts without an order"
    return weight


def _shared(layers: ExpertLayers, count: int) -> tuple[Sequence[GroupedWeight], Sequence[GroupedWeight]]:
    """Splits the shared experts, which the checkpoint stores as one wide MLP, into single experts."""
    gate_up, down = _grouped(layers.gate_up_proj), _grouped(layers.down_proj)
    total = down.k
    width = total // count
    ranges = [(begin, begin + width) for begin in range(0, total, width)]
    rows = [(gate_up.at(slice(a, b)), gate_up.at(slice(total + a, total + b))) for a, b in ranges]
    return [rows_joined(pair) for pair in rows], [down.columns(a, b) for a, b in ranges]
