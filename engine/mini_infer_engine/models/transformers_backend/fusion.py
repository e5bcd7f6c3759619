"""Computes recognised layers of transformers by our operations, which merge products and fuse what is around them.

Queries, keys and values are one product, gates and ups another: their weights lie side by side in memory, and the
modules' own parameters are views of it, so that names and loading stay as they are.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.norm import RMSNorm
from mini_infer_engine.models.transformers_backend.attention import Handover, paged_calls
from mini_infer_engine.models.transformers_backend.recognition import (
    LlamaLayer,
    is_llama_norm,
    llama_layer,
    only_passes_states_on,
)
from mini_infer_engine.models.transformers_backend.sharding.forwards import pass_ops
from mini_infer_engine.ops.base import ResidualState


class FusedLayers:
    """The recognised layers of a model on one rank."""

    def __init__(self, backbone: nn.Module) -> None:
        """Finds the layers of a decoder."""
        layers = list(backbone.modules()) if only_passes_states_on(backbone) else []
        self._found = [found for module in layers if (found := llama_layer(module)) is not None]
        inside = {part for found in self._found for part in found.layer.modules()}
        dtype = torch.get_default_dtype()
        norms = [module for module in backbone.modules() if module not in inside and is_llama_norm(module)]
        self._norms = [module for module in norms if all(each.dtype == dtype for each in module.parameters())]

    def __len__(self) -> int:
        return len(self._found)

    def merge(self) -> None:
        """Puts the weights of sibling products side by side. Call it when parameters have memory, before loading."""
        for found in self._found:
            attention = found.attention
            for siblings in ([attention.q_proj, attention.k_proj, attention.v_proj], _gates(found)):
                _merge(siblings, "weight")
                _merge(siblings, "bias")

    def replace_forwards(self) -> None:
        """Replaces the forwards of layers and norms. Call it when weights are loaded."""
        norms = {module: _norm(module) for module in self._norms}
        final = next(iter(norms.values()), None)
        layers = [_FusedLayer(found) for found in self._found]
        for number, layer in enumerate(layers, start=1):
            layer.next_norm = layers[number].input_norm if number < len(layers) else final or layer.input_norm
            layer.module.forward = MethodType(_with_self(layer.forward), layer.module)
        for module, norm in norms.items():
            module.forward = MethodType(_with_self(_FusedNorm(norm).forward), module)


class _FusedNorm:
    """An RMS norm."""

    def __init__(self, norm: RMSNorm) -> None:
        self._norm = norm

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns the norm, which the layer before it may have computed."""
        flat = hidden_states.flatten(0, -2)
        state = paged_calls().handover.take(hidden_states, self._norm) or ResidualState(flat)
        return pass_ops().norm(state, self._norm).view(hidden_states.shape)


class _FusedLayer:
    """A decoder layer."""

    def __init__(self, found: LlamaLayer) -> None:
        attention, mlp = found.attention, found.mlp
        self.module = found.layer
        self.input_norm, self._attention_norm = _norm(found.input_norm), _norm(found.attention_norm)
        self.next_norm = self.input_norm
        """The norm that reads this layer's output, if it is known."""
        self._qkv = _joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self._out, self._gate_up, self._down = (
            _joined([attention.o_proj]),
            _joined(_gates(found)),
            _joined([mlp.down_proj]),
        )
        self._head_norms = (_norm(attention.q_norm), _norm(attention.k_norm)) if found.has_head_norms else None

    def forward(self, hidden_states: Tensor, *_: Any, position_embeddings: tuple[Tensor, Tensor], **__: Any) -> Tensor:
        """Returns the hidden states [1, tokens, hidden] after the layer."""
        ops, calls = pass_ops(), paged_calls()
        state = calls.handover.take(hidden_states, self.input_norm) or ResidualState(hidden_states[0])
        qkv = ops.norm_linear(state, self.input_norm, self._qkv)
        cos, sin = position_embeddings
        mixed = calls.attend_projected(qkv, cos[0], sin[0], self._head_norms)
        state = ops.linear_add_norm(mixed, self._out, state, self._attention_norm)
        gated = ops.norm_gated_linear(state, self._attention_norm, self._gate_up, "silu")
        state = ops.linear_add_norm(gated, self._down, state, self.next_norm)
        made = state.residual.unsqueeze(0)
        calls.handover = Handover(made, state, self.next_norm)
        return made


def _with_self(function: Any) -> Any:
    return lambda _module, *arguments, **named: function(*arguments, **named)


def _gates(found: LlamaLayer) -> list[nn.Linear]:
    return [found.mlp.gate_proj, found.mlp.up_proj]


def _merge(layers: Sequence[nn.Linear], name: str) -> None:
    """Makes the parameters of this name views of one tensor, in their order."""
    parameters = [getattr(layer, name) for layer in layers]
    if parameters[0] is None:
        return
    whole = torch.cat([parameter.data for parameter in parameters])
    parts = torch.split(whole, [len(parameter) for parameter in parameters])
    for layer, part in zip(layers, parts, strict=True):
        layer.register_parameter(name, nn.Parameter(part, requires_grad=False))


def _joined(layers: Sequence[nn.Linear]) -> Linear:
    """Returns the product of merged layers, over their memory."""
    first, rows = layers[0], sum(layer.out_features for layer in layers)
    linear = Linear(0, 0)
    linear.out_features, linear.in_features = rows, first.in_features
    linear.weight = nn.Parameter(_whole(first.weight, rows), requires_grad=False)
    linear.bias = None if first.bias is None else nn.Parameter(_whole(first.bias, rows), requires_grad=False)
    return linear


def _whole(first: Tensor, rows: int) -> Tensor:
    """Returns the rows of the tensor of which `first` is the beginning."""
    return torch.as_strided(first.data, (rows, *first.shape[1:]), first.stride(), first.storage_offset())


def _norm(module: Any) -> RMSNorm:
    norm = RMSNorm(0, module.variance_epsilon)
    norm.weight = module.weight
    return norm
