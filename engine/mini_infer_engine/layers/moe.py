"""Describes a mixture of experts as data: the router's weight, and all experts' weights stacked; `ops` compute it.

`quantization.experts` adds quantised experts: it sets `stored` to the object that makes the stacks.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from mini_infer_engine.config.model.model_config import Activation
from mini_infer_engine.config.parallelism.tensor_parallel import ALONE, Shard, TensorParallel, side_by_side
from mini_infer_engine.kernels.gemm.grouped_weight import GroupedWeight, dequantized_groups
from mini_infer_engine.layers.linear import Linear, PackedLinear
from mini_infer_engine.layers.placement import Part, Placement


@dataclass(frozen=True, slots=True)
class MoESpec:
    """The shape of one mixture (Shazeer et al. 2017, arXiv 1701.06538)."""

    hidden_size: int
    intermediate_size: int
    """The width of one expert."""
    num_experts: int
    top_k: int
    """Experts that compute each token."""
    normalizes_top_k: bool
    """True if the weights of a token's experts are divided by their sum."""
    num_shared: int = 0
    """Experts that compute every token, with weight 1 (DeepSeekMoE, arXiv 2401.06066): they are stacked after the
    others.
    """
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """The function that turns the router's logits into weights."""
    scale: float = 1.0
    """The factor of the weights, applied last."""
    num_groups: int = 1
    """The number of equal groups of experts, of which the `top_groups` best provide a token's experts.

    A group's score is that of its best expert; with sigmoid scoring, the sum of its two best.
    """
    top_groups: int = 1
    gated_shared_size: int = 0
    """The width of one more expert that computes every token, and whose output a sigmoid weighs (Qwen2-MoE, Yang et al.
    2024, arXiv 2407.10671); 0: there is none.
    """
    is_gated: bool = True
    """True if an expert computes down(silu(gate(x)) * up(x)); False if it computes down(relu(up(x))^2)."""
    latent_size: int | None = None
    """The width of the experts' inputs and outputs, if it is not the hidden width: each is mapped by a product that all
    experts share (LatentMoE, Elango et al. 2026, arXiv 2601.18089).
    """
    has_correction: bool = False
    """True if a bias is added to the scores that choose experts (not to the weights): it balances the experts' load."""
    has_bias: bool = False
    """True if the router and the experts' products have biases."""
    swiglu_limit: float | None = None
    """The bound of `swiglu_oai`, which gates the experts; None: activation(gate) * up."""
    activation: Activation = "silu"
    """The activation of an expert's gate."""
    has_expert_scale: bool = False
    """True if each expert's weight is multiplied by a number of its own, after all weights are normalised."""

    @property
    def num_stacked(self) -> int:
        """The number of routed and shared experts together."""
        return self.num_experts + self.num_shared

    @property
    def shared_size(self) -> int:
        """The width of all shared experts together: the checkpoint stores them as one MLP."""
        return self.num_shared * self.intermediate_size

    @property
    def experts_per_token(self) -> int:
        """The number of routed and shared experts that compute a token."""
        return self.top_k + self.num_shared


SWIGLU_ALPHA = 1.702
"""The factor of the gate within the sigmoid of `swiglu_oai`, with which it is near to GELU (arXiv 1606.08415)."""


def swiglu_oai(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Returns gpt-oss's clamped SwiGLU, gate * sigmoid(1.702 gate) * (up + 1), with gate and up limited (gpt-oss model
    card, arXiv 2508.10925).
    """
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * (gate * SWIGLU_ALPHA).sigmoid_()).mul_(up.add_(1.0))


class StoredExperts(Protocol):
    """Loads quantised experts into memory."""

    def process_weights_after_loading(self, moe: "SparseMoE") -> None:
        """Brings the loaded tensors into the form that is computed with; may be called twice."""

    def weights(self) -> tuple[GroupedWeight, GroupedWeight]:
        """Returns the stacks of `SparseMoE.weights`, once everything is loaded."""


class ExpertLayers(nn.Module):
    """The products of one expert, or of all shared ones together, under the checkpoint's names."""

    def __init__(self, hidden_size: int, width: Shard, *, is_summed: bool) -> None:
        super().__init__()
        self.gate_up_proj: Linear = PackedLinear(hidden_size, {"gate_proj": width, "up_proj": width})
        self.down_proj = Linear(width.count, hidden_size, columns=width if is_summed else None)


class SparseMoE(nn.Module):
    """Computes the sum over a token's experts of weight * down(silu(gate(x)) * up(x)).

    The router and `MoESpec` determine the experts and their weights. In a tensor-parallel group each rank has a share
    of every expert's width, or some whole experts. With whole experts all ranks route alike, and each computes the
    tokens of its own experts and a share of the shared experts' width. A rank's result is a summand.
    """

    stores_stacks: ClassVar[bool] = False
    """True if checkpoints of this class always have the two stacks as tensors of their own names."""

    def __init__(self, spec: MoESpec, parallel: TensorParallel = ALONE) -> None:
        super().__init__()
        self.is_summed = parallel.size > 1
        self.shared_share = parallel.even(spec.shared_size)
        """The columns of this rank in the shared experts' total width, one expert after the other."""
        self.shared_experts: ExpertLayers | None = None
        """The shared experts outside the stacks, if ranks have whole experts or a gate weighs them. None: there are
        none, or they are stacked.
        """
        if parallel.whole_experts and spec.num_shared:
            self.shared_experts = ExpertLayers(spec.hidden_size, self.shared_share, is_summed=self.is_summed)
            spec = replace(spec, num_shared=0)
        self.shared_gate: Linear | None = None
        """Weighs the output of `shared_experts`; None: it is added as it is."""
        if spec.gated_shared_size:
            shared_width = parallel.even(spec.gated_shared_size)
            self.shared_experts = ExpertLayers(spec.hidden_size, shared_width, is_summed=self.is_summed)
            self.shared_gate = Linear(spec.hidden_size, 1)
        self.spec = spec
        """The shape of the stacked experts."""
        whole = TensorParallel() if parallel.whole_experts else parallel
        self._share = whole.even(spec.intermediate_size)
        self.local_experts = range(spec.num_stacked)
        """The experts whose weights this rank has; the stacks begin with the first of them."""
        if parallel.whole_experts:
            ((begin, end),) = parallel.even(spec.num_experts).ranges
            self.local_experts = range(begin, end)
        self.reads_stacks = False
        """True if the checkpoint has the two stacks as tensors; False if it has each expert's own."""
        self.transposes_stacks = False
        """True if the matrices of those stacks are stored transposed, with a row for each input."""
        self.stored: StoredExperts | None = None
        """The quantised experts. None: weights are in the model's dtype, in `gate_up_proj` and `down_proj`."""
        experts, hidden, width = len(self.local_experts), spec.latent_size or spec.hidden_size, self._share.count
        self.gate = Linear(spec.hidden_size, spec.num_experts, bias=spec.has_bias)
        self.latent_in_proj = None if spec.latent_size is None else Linear(spec.hidden_size, hidden)
        self.latent_out_proj = None if spec.latent_size is None else Linear(hidden, spec.hidden_size)
        correction = torch.empty(spec.num_experts, dtype=torch.float32) if spec.has_correction else None
        self.correction = None if correction is None else nn.Parameter(correction, requires_grad=False)
        scale = torch.empty(spec.num_experts) if spec.has_expert_scale else None
        self.expert_scale = None if scale is None else nn.Parameter(scale, requires_grad=False)
        rows = 2 * width if spec.is_gated else width
        self.gate_up_proj = nn.Parameter(torch.empty(experts, rows, hidden), requires_grad=False)
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width), requires_grad=False)
        self.gate_up_bias: nn.Parameter | None = None
        self.down_bias: nn.Parameter | None = None
        """The biases of the stacks; where ranks share the width of every expert, one of them adds that of `down`."""
        if spec.has_bias:
            self.gate_up_bias = nn.Parameter(torch.empty(experts, 2 * width), requires_grad=False)
            self.down_bias = nn.Parameter(torch.empty(experts, hidden), requires_grad=False)

    @property
    def unquantized_layers(self) -> list[Linear]:
        """The layers that stay in the model's dtype whatever is quantised: they choose or weigh experts."""
        return [self.gate] if self.shared_gate is None else [self.gate, self.shared_gate]

    @property
    def share(self) -> Shard:
        """The columns of this rank in every expert's width."""
        return self._share

    def weights(self) -> tuple[Tensor | GroupedWeight, Tensor | GroupedWeight]:
        """Returns the stacks [experts, 2 * width, hidden], gate first, and [experts, hidden, width].

        Experts without gates have a first stack of half the height.
        """
        return (self.gate_up_proj, self.down_proj) if self.stored is None else self.stored.weights()

    def finish_loading(self) -> None:
        """Brings quantised experts into the form that is computed with; may be called twice."""
        if self.stored is not None:
            self.stored.process_weights_after_loading(self)

    def checkpoint_tensors(self, path: str) -> dict[str, Placement]:
        """Maps each expert's own three names, as Qwen and Mixtral's successors use them, to its part of the stacks."""
        width = self._share.count
        rows, columns = (Part(dim, self._share) if self.is_summed else None for dim in (0, 1))
        tensors: dict[str, Placement] = {}
        if self.correction is not None:
            size = self.spec.num_experts
            shapes = ((size,), (1, size))  # ERNIE's has a row for each modality, here one
            tensors[f"{path}.gate.e_score_correction_bias"] = Placement(self.correction, shapes, torch.flatten)
        if self.expert_scale is not None:
            tensors[f"{path}.expert_scale"] = Placement(self.expert_scale)
        if not self.gate_up_proj.numel():
            return tensors  # a quantised checkpoint's layers have placements of their own
        if self.reads_stacks:
            return tensors | self.stack_placements(f"{path}.experts.gate_up_proj", f"{path}.experts.down_proj")
        for expert in range(self.spec.num_experts):
            name = f"{path}.experts.{expert}"
            if expert not in self.local_experts:
                tensors |= self._unread(name)
                continue
            here = expert - self.local_experts.start
            tensors[f"{name}.gate_proj.weight"] = Placement(self.gate_up_proj[here, :width], part=rows)
            tensors[f"{name}.up_proj.weight"] = Placement(self.gate_up_proj[here, width:], part=rows)
            tensors[f"{name}.down_proj.weight"] = Placement(self.down_proj[here], part=columns)
        return tensors | (self._shared_tensors(f"{path}.shared_experts") if self.spec.num_shared else {})

    def stack_placements(self, gate_up: str, down: str) -> dict[str, Placement]:
        """Maps a checkpoint's two stacks of all experts, by their names, to this rank's experts, or to its share of the
        width of each.
        """
        begin, end = self.local_experts.start, self.local_experts.stop
        experts, size, hidden = self.spec.num_experts, self.spec.intermediate_size, self.gate_up_proj.shape[2]
        sides = 2 if self.spec.is_gated else 1
        rows, columns = (2, 1) if self.transposes_stacks else (1, 2)
        parts: tuple[Part | None, Part | None] = (None, None)
        if end - begin < experts:
            parts = (Part(0, Shard(experts, ((begin, end),))),) * 2
        elif self.is_summed:
            parts = Part(rows, side_by_side([self._share] * sides)), Part(columns, self._share)
        shapes, expand = ((experts, sides * size, hidden), (experts, hidden, size)), None
        if self.transposes_stacks:
            shapes = ((experts, hidden, sides * size), (experts, size, hidden))
            expand = partial(torch.transpose, dim0=1, dim1=2)
        return {
            gate_up: Placement(self.gate_up_proj, (shapes[0],), expand, parts[0]),
            down: Placement(self.down_proj, (shapes[1],), expand, parts[1]),
        }

    def _unread(self, name: str) -> dict[str, Placement]:
        """Returns placements of another rank's expert: its shapes are checked, and none of its rows are read."""
        wide, high = (
            Part(0, Shard(total, ((0, 0),))) for total in (self.spec.intermediate_size, self.spec.hidden_size)
        )
        gate_up, down = self.gate_up_proj[0, :0], self.down_proj[0, :0]
        return {
            f"{name}.gate_proj.weight": Placement(gate_up, part=wide),
            f"{name}.up_proj.weight": Placement(gate_up, part=wide),
            f"{name}.down_proj.weight": Placement(down, part=high),
        }

    def _shared_tensors(self, path: str) -> dict[str, Placement]:
        """Maps the shared experts, one wide MLP in the checkpoint, to the stacks: each is a part of its width.

        In a tensor-parallel group it is a part of a rank's share of the width.
        """
        spec, width = self.spec, self._share.count
        rows, columns = (spec.shared_size, spec.hidden_size), (spec.hidden_size, spec.shared_size)
        gate_up, down = self.gate_up_proj[spec.num_experts :], self.down_proj[spec.num_experts :]
        by_rows, by_columns = (partial(split, spec.num_shared) for split in (_split_rows, _split_columns))
        high, wide = (Part(dim, self.shared_share) if self.is_summed else None for dim in (0, 1))
        return {
            f"{path}.gate_proj.weight": Placement(gate_up[:, :width], (rows,), by_rows, high),
            f"{path}.up_proj.weight": Placement(gate_up[:, width:], (rows,), by_rows, high),
            f"{path}.down_proj.weight": Placement(down, (columns,), by_columns, wide),
        }


def expert_weight(weights: Tensor | GroupedWeight, expert: int, dtype: torch.dtype) -> Tensor:
    """Returns one expert of a stack, [rows, columns], for plain torch."""
    if isinstance(weights, Tensor):
        return weights[expert]
    return dequantized_groups(weights.at(expert)).to(dtype)


def _split_rows(count: int, weight: Tensor) -> Tensor:
    return weight.view(count, -1, weight.shape[1])


def _split_columns(count: int, weight: Tensor) -> Tensor:
    return weight.view(len(weight), count, -1).transpose(0, 1)
