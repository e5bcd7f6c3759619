"""Translates GGUF's architectures of dense decoders. It knows no file. No torch."""

from typing import Any

from mini_infer_engine.gguf.translation import Architecture, Metadata

LLAMA_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_BLOCK = LLAMA_BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OLMO2_BLOCK = LLAMA_BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3_BLOCK = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62


def _plain(metadata: Metadata) -> dict[str, Any]:
    del metadata
    return {}


def _llama(metadata: Metadata) -> dict[str, Any]:
    return biases(metadata)


def _phi3(metadata: Metadata) -> dict[str, Any]:
    original = metadata.get("rope.scaling.original_context_length")
    return {"sliding_window": metadata.get("attention.sliding_window") or None} | (
        {} if original is None else {"original_max_position_embeddings": original}
    )


def biases(metadata: Metadata) -> dict[str, Any]:
    """Returns whether attention and feed-forward blocks have biases."""
    return {
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": metadata.has_tensor("blk.0.ffn_up.bias"),
    }


def _gemma(metadata: Metadata, large_layers: int) -> dict[str, Any]:
    """Returns the fields of Gemma 2 and 3. The file lacks the scale of queries; the number of layers implies it.

    llama.cpp derives it in the same way.
    """
    hidden, heads = metadata.need("embedding_length"), metadata.need("attention.head_count")
    is_large = metadata.need("block_count") == large_layers
    return {
        "query_pre_attn_scalar": hidden // heads if is_large else metadata.get("attention.key_length", 256),
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": metadata.get("attention.sliding_window"),
    }


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    return _gemma(metadata, _GEMMA2_27B_LAYERS) | {
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping"),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
    }


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    return _gemma(metadata, _GEMMA3_27B_LAYERS) | {"rope_theta": metadata.get("rope.freq_base", 1e6)}


def granite(metadata: Metadata) -> dict[str, Any]:
    """Returns Granite's multipliers."""
    return biases(metadata) | {
        "attention_multiplier": metadata.need("attention.scale"),
        "embedding_multiplier": metadata.get("embedding_scale", 1.0),
        "residual_multiplier": metadata.get("residual_scale", 1.0),
        "logits_scaling": metadata.get("logit_scale", 1.0),
    }


DENSE = {
    "gemma2": Architecture("Gemma2ForCausalLM", _gemma2, _GEMMA_BLOCK, offsets_norms=True),
    "gemma3": Architecture("Gemma3ForCausalLM", _gemma3, _GEMMA_BLOCK, offsets_norms=True),
    "granite": Architecture("GraniteForCausalLM", granite, LLAMA_BLOCK, interleaves=True),
    "llama": Architecture("LlamaForCausalLM", _llama, LLAMA_BLOCK, interleaves=True),
    "olmo2": Architecture("Olmo2ForCausalLM", _plain, _OLMO2_BLOCK),
    "phi3": Architecture("Phi3ForCausalLM", _phi3, LLAMA_BLOCK | _PHI3_BLOCK, rotates_partly=True),
    "qwen2": Architecture("Qwen2ForCausalLM", _plain, LLAMA_BLOCK),
    "qwen3": Architecture("Qwen3ForCausalLM", _plain, LLAMA_BLOCK),
    "smollm3": Architecture("SmolLM3ForCausalLM", biases, LLAMA_BLOCK, interleaves=True),
}
"""Translations by `general.architecture`."""
