"""Translates GGUF's architectures: metadata to `config.json`, and tensor names to those of checkpoints.

Reverses llama.cpp's convert_hf_to_gguf.py. It knows neither files nor encodings of weights. No torch.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.gguf.header import GgufHeader

Change = Literal["none", "interleaved_rows", "plus_one"]
"""The converter's change of a tensor: it interleaves the two halves of each head of q or k, or adds one to a norm."""

EXPERT = "{expert}"
"""A placeholder in a name for the number of each expert: a file has all experts of a layer in one tensor."""
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LLAMA_BLOCK = {
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
_GEMMA_BLOCK = _LLAMA_BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OLMO2_BLOCK = _LLAMA_BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS_BLOCK = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": f"mlp.experts.{EXPERT}.gate_proj",
    "ffn_up_exps": f"mlp.experts.{EXPERT}.up_proj",
    "ffn_down_exps": f"mlp.experts.{EXPERT}.down_proj",
}
_MIXTRAL_BLOCK = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": f"block_sparse_moe.experts.{EXPERT}.w1",
    "ffn_down_exps": f"block_sparse_moe.experts.{EXPERT}.w2",
    "ffn_up_exps": f"block_sparse_moe.experts.{EXPERT}.w3",
}
_PHI3_BLOCK = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_ROPE_FACTORS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS_TENSORS = (_ROPE_FACTORS, _LONG_FACTORS, _SHORT_FACTORS)
"""Tensors of divisors of the rotation's frequencies, [rotated dimensions / 2]: scaling of Llama 3.1 and longrope.

`model_config` takes their values.
"""
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
"""Tokens that end an answer, whatever the file names as EOS (llama.cpp does the same)."""
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62


@dataclass(frozen=True, slots=True)
class Architecture:
    """The translation of one value of `general.architecture`."""

    name: str
    """The name in `architectures` of config.json."""
    fields: Callable[["Metadata"], dict[str, Any]]
    """Returns the fields of config.json that not all architectures share."""
    block: Mapping[str, str]
    """Names within a layer, from GGUF's to the checkpoint's."""
    interleaves: bool = False
    """True if q and k are stored interleaved."""
    offsets_norms: bool = False
    """True if norms are stored plus one."""
    rotates_partly: bool = False
    """True if a model may rotate only the first dimensions of a head."""


class Metadata:
    """The metadata fields of one architecture, whose keys begin with its name."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.architecture = str(header.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a value, or the default."""
        return self.header.metadata.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        """Returns a value. Raises ModelError if there is none."""
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self.header.path}: {self.architecture}.{key} is missing: convert the model again.")
        return value

    def has_tensor(self, name: str) -> bool:
        """True if the file has the tensor."""
        return name in self.header.tensors

    def refuse(self, key: str, remedy: str) -> ModelError:
        """Returns the error for a value that is not supported."""
        return ModelError(f"{self.header.path}: {self.architecture}.{key} = {self.get(key)!r}: {remedy}.")


def _plain(metadata: Metadata) -> dict[str, Any]:
    del metadata
    return {}


def _llama(metadata: Metadata) -> dict[str, Any]:
    return _biases(metadata)


def _mixtral(metadata: Metadata) -> dict[str, Any]:
    return {
        "num_local_experts": metadata.need("expert_count"),
        "num_experts_per_tok": metadata.need("expert_used_count"),
    }


def _qwen3moe(metadata: Metadata) -> dict[str, Any]:
    return {
        "num_experts": metadata.need("expert_count"),
        "num_experts_per_tok": metadata.need("expert_used_count"),
        "moe_intermediate_size": metadata.need("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _phi3(metadata: Metadata) -> dict[str, Any]:
    original = metadata.get("rope.scaling.original_context_length")
    return {"sliding_window": metadata.get("attention.sliding_window") or None} | (
        {} if original is None else {"original_max_position_embeddings": original}
    )


def _biases(metadata: Metadata) -> dict[str, Any]:
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


def _granite(metadata: Metadata) -> dict[str, Any]:
    return _biases(metadata) | {
        "attention_multiplier": metadata.need("attention.scale"),
        "embedding_multiplier": metadata.get("embedding_scale", 1.0),
        "residual_multiplier": metadata.get("residual_scale", 1.0),
        "logits_scaling": metadata.get("logit_scale", 1.0),
    }


ARCHITECTURES = {
    "gemma2": Architecture("Gemma2ForCausalLM", _gemma2, _GEMMA_BLOCK, offsets_norms=True),
    "gemma3": Architecture("Gemma3ForCausalLM", _gemma3, _GEMMA_BLOCK, offsets_norms=True),
    "granite": Architecture("GraniteForCausalLM", _granite, _LLAMA_BLOCK, interleaves=True),
    "llama": Architecture("LlamaForCausalLM", _llama, _LLAMA_BLOCK, interleaves=True),
    "mixtral": Architecture("MixtralForCausalLM", _mixtral, _LLAMA_BLOCK | _MIXTRAL_BLOCK, interleaves=True),
    "olmo2": Architecture("Olmo2ForCausalLM", _plain, _OLMO2_BLOCK),
    "phi3": Architecture("Phi3ForCausalLM", _phi3, _LLAMA_BLOCK | _PHI3_BLOCK, rotates_partly=True),
    "qwen2": Architecture("Qwen2ForCausalLM", _plain, _LLAMA_BLOCK),
    "qwen3": Architecture("Qwen3ForCausalLM", _plain, _LLAMA_BLOCK),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _qwen3moe, _LLAMA_BLOCK | _EXPERTS_BLOCK),
    "smollm3": Architecture("SmolLM3ForCausalLM", _biases, _LLAMA_BLOCK, interleaves=True),
}
"""Translations by `general.architecture`; Mixtral's value is "llama"."""


def architecture_of(header: GgufHeader) -> Architecture:
    """Returns the file's architecture. Raises ModelError if it is not supported."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{header.path}: general.architecture = {name!r}: read from GGUF are {known}.")
    if name == "llama" and header.metadata.get("llama.expert_count"):
        return ARCHITECTURES["mixtral"]
    return ARCHITECTURES[name]


def model_config(header: GgufHeader, factors: Mapping[str, list[float]]) -> dict[str, Any]:
    """Returns `config.json` as an object; `factors` are the values of the `FACTORS_TENSORS` that the file has.

    Raises ModelError if the architecture is not supported, or a field is missing.
    """
    architecture, metadata = architecture_of(header), Metadata(header)
    embeddings = header.tensors.get("token_embd.weight")
    if embeddings is None:
        raise ModelError(f"{header.path}: tensor token_embd.weight is missing: the file is broken; download it again.")
    if (parts := header.metadata.get("split.count", 1)) not in (0, 1):
        raise ModelError(
            f"{header.path} is one of {parts} parts of a model: make one file of them (llama-gguf-split --merge)."
        )
    for key in ("embedding_length", "attention.head_count", "attention.head_count_kv"):
        value = metadata.get(key, 1)
        if isinstance(value, list):
            raise metadata.refuse(key, "layers of different widths are not supported")
        if not isinstance(value, int) or value <= 0:
            raise metadata.refuse(key, "it must be a positive integer")
    heads, hidden = metadata.need("attention.head_count"), metadata.need("embedding_length")
    rotary_dim = metadata.get("rope.dimension_count")
    usual_dim = hidden // heads if architecture.rotates_partly else rotary_dim or hidden // heads
    head_dim = metadata.get("attention.key_length", usual_dim)
    if rotary_dim not in (None, head_dim) and not architecture.rotates_partly:
        raise metadata.refuse("rope.dimension_count", f"only whole heads, of {head_dim} dimensions, are rotated here")
    common = {
        "architectures": [architecture.name],
        "vocab_size": embeddings.shape[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.need("feed_forward_length"),
        "num_hidden_layers": metadata.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.need("context_length"),
        "rms_norm_eps": metadata.need("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.get("rope.freq_base", 10_000.0),
        "tie_word_embeddings": not metadata.has_tensor("output.weight"),
        "torch_dtype": "bfloat16",
        "eos_token_id": eos_token_ids(header),
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
    }
    if architecture.rotates_partly and rotary_dim:
        common["partial_rotary_factor"] = rotary_dim / head_dim
    scaling = _rope_scaling(metadata, factors)
    if scaling is not None:
        common["rope_scaling"] = scaling
    return common | architecture.fields(metadata)


def eos_token_ids(header: GgufHeader) -> list[int]:
    """Returns the file's tokens for the end of text, of a turn and of a message, and well-known ends of a turn."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = [header.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    places = {token: index for index, token in enumerate(tokens)} if isinstance(tokens, list) else {}
    known = [places[token] for token in _TURN_ENDS if token in places]
    return sorted({token_id for token_id in (*named, *known) if isinstance(token_id, int)})


def _rope_scaling(metadata: Metadata, factors: Mapping[str, list[float]]) -> dict[str, Any] | None:
    """Returns `rope_scaling` of config.json. Llama 3.1's factors become longrope's, which divides frequencies in the
    same way.
    """
    if _ROPE_FACTORS in factors:
        both = factors[_ROPE_FACTORS]
        return {"rope_type": "longrope", "attention_factor": 1.0, "factor": 1.0} | {
            "short_factor": both,
            "long_factor": both,
        }
    if _LONG_FACTORS in factors and _SHORT_FACTORS in factors:
        scaling = {"short_factor": factors[_SHORT_FACTORS], "long_factor": factors[_LONG_FACTORS]}
        return {"rope_type": "longrope", "attention_factor": metadata.get("rope.scaling.attn_factor")} | scaling
    kind = metadata.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": metadata.need("rope.scaling.factor")}
    if kind == "yarn":
        original = metadata.need("rope.scaling.original_context_length")
        factor = metadata.need("rope.scaling.factor")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise metadata.refuse("rope.scaling.type", "supported are none, linear and yarn")


def checkpoint_name(architecture: Architecture, name: str) -> str | None:
    """Returns a tensor's name in Hugging Face's checkpoints, with `EXPERT` if it has all experts, or None if it is no
    weight.
    """
    if name in FACTORS_TENSORS:
        return None  # it is in the config
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    found = _BLOCK.fullmatch(name)
    if found is None or found[2] not in architecture.block:
        return name  # unknown: whoever loads it says so
    return f"model.layers.{found[1]}.{architecture.block[found[2]]}.{found[3]}"


def change_of(architecture: Architecture, name: str) -> Change:
    """Returns the change that must be undone for a tensor of GGUF's name."""
    if architecture.interleaves and re.fullmatch(r"blk\.\d+\.attn_[qk]\.(weight|bias)", name):
        return "interleaved_rows"
    if architecture.offsets_norms and name.endswith("norm.weight"):
        return "plus_one"
    return "none"
