"""Replaces the attention of architectures whose modules do not call transformers' attention interface.

A replacement projects, splits and rotates by the module's own parts and methods, and hands queries, keys and values to
the interface as other models do. It knows nothing of pages.
"""

import importlib
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from mini_infer_engine.models.transformers_backend.attention import PAGED, paged_attention

Forward = Callable[..., tuple[Tensor, None]]
_WITH_MASK = "mini_infer_paged_with_mask"
"""Our attention for MPT, whose code converts a mask that the others do without."""


def _empty_mask(*_: Any, **__: Any) -> Tensor:
    """Implements transformers' mask interface for a mask that nobody reads."""
    return torch.empty(0)


AttentionInterface.register(_WITH_MASK, paged_attention)
AttentionMaskInterface.register(_WITH_MASK, _empty_mask)


def _own_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Replaces `_attn` of GPT-J, CodeGen and GPT-Neo, which takes and returns [1, heads, tokens, head_dim]."""
    window = module.config.window_size if getattr(module, "attention_type", None) == "local" else None
    scale = 1.0 / float(getattr(module, "scale_attn", 1.0))
    mixed, _weights = paged_attention(module, query, key, value, scaling=scale, sliding_window=window)
    return mixed.transpose(1, 2), None


def _falcon(
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Replaces `forward` of FalconAttention, which repeats the keys of a group for each of its heads."""
    del attention_mask
    heads = [each.transpose(1, 2) for each in module._split_heads(module.query_key_value(hidden_states))]
    copies = heads[1].shape[1] // module.num_kv_heads
    query, key, value = heads[0], heads[1][:, ::copies], heads[2][:, ::copies]
    if alibi is None:
        rotate = importlib.import_module(type(module).__module__).apply_rotary_pos_emb
        assert position_embeddings is not None, "the model makes them where it has no ALiBi"
        query, key = rotate(query, key, *position_embeddings)
        mixed, _weights = paged_attention(module, query, key, value, scaling=module.inv_norm_factor)
    else:
        slopes = _slopes(module) * module.inv_norm_factor
        mixed, _weights = paged_attention(module, query, key, value, scaling=module.inv_norm_factor, alibi=slopes)
    return module.dense(mixed.flatten(2)), None


def _bloom(module: Any, hidden_states: Tensor, residual: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Replaces `forward` of BloomAttention."""
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    slopes = _slopes(module)
    mixed, _weights = paged_attention(module, query, key, value, scaling=module.inv_norm_factor, alibi=slopes)
    return residual + module.dense(mixed.flatten(2)), None


def _mpt(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Replaces `forward` of MptAttention. Its model adds biases of ALiBi whatever its config says."""
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = (
        part.unflatten(2, (module.n_heads, module.head_dim)).transpose(1, 2) for part in mixed.chunk(3, dim=2)
    )
    build = importlib.import_module(type(module).__module__).build_mpt_alibi_tensor
    slopes = -build(module.n_heads, 2, device="cpu")[:, 0, 0]  # of the distances -1 and 0
    attended, _weights = paged_attention(module, query, key, value, scaling=module.softmax_scale, alibi=slopes)
    return module.out_proj(attended.flatten(2)), None


def _xglm(module: Any, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Replaces `forward` of XGLMAttention in a decoder without cross-attention."""
    query, key, value = (
        project(hidden_states).unflatten(2, (module.num_heads, module.head_dim)).transpose(1, 2)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    mixed, _weights = paged_attention(module, query, key, value, scaling=module.scaling)
    return module.out_proj(mixed.flatten(2)), None


def _slopes(module: Any) -> Tensor:
    """Returns the slopes [heads] of Bloom's ALiBi in fp32, on the CPU.

    Falcon's builder would round them to bf16 before it multiplies; those are the slopes, too.
    """
    build = importlib.import_module("transformers.models.bloom.modeling_bloom").build_alibi_tensor
    biases: Tensor = build(torch.ones(1, 2, dtype=torch.int64), module.num_heads, torch.float32)
    return biases[:, 0, 1]  # of the position 1


_ADAPTED: dict[str, tuple[str, Forward]] = {
    "BloomAttention": ("forward", _bloom),
    "CodeGenAttention": ("_attn", _own_attention),
    "FalconAttention": ("forward", _falcon),
    "GPTJAttention": ("_attn", _own_attention),
    "GPTNeoSelfAttention": ("_attn", _own_attention),
    "MptAttention": ("forward", _mpt),
    "XGLMAttention": ("forward", _xglm),
}
"""The method of a module of transformers that is replaced, by the module's class."""
_MODEL_TYPES = frozenset({"bloom", "codegen", "falcon", "gpt_neo", "gptj", "mpt", "xglm"})


def needs_adapter(model_type: str) -> bool:
    """True if the attention of this `model_type` is replaced after the model is built with its own."""
    return model_type in _MODEL_TYPES


def adapt(model: PreTrainedModel, attention: str) -> None:
    """Replaces the attention of a model that was built with its own, and makes its masks those of `attention`."""
    is_mpt = model.config.model_type == "mpt"
    model.config._attn_implementation = _WITH_MASK if is_mpt and attention == PAGED else attention
    for module in model.modules():
        kind = type(module)
        if kind.__name__ in _ADAPTED and kind.__module__.startswith("transformers.models."):
            name, replacement = _ADAPTED[kind.__name__]
            setattr(module, name, MethodType(replacement, module))
