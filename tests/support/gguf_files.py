"""GGUF files as llama.cpp's converter writes them, made by the package `gguf` from random tiny models."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Encoding

from tests.support.tiny_models import save_tiny_model

ARCHITECTURE_ENUM = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
INTERLEAVED = ("granite", "llama", "mixtral", "smollm3")
K_QUANTS = (Encoding.Q2_K, Encoding.Q3_K, Encoding.Q4_K, Encoding.Q5_K, Encoding.Q6_K)
I_QUANTS = (
    *(Encoding.IQ1_S, Encoding.IQ2_XXS, Encoding.IQ2_XS, Encoding.IQ2_S, Encoding.IQ3_XXS, Encoding.IQ3_S),
    *(Encoding.IQ4_NL, Encoding.IQ4_XS, Encoding.TQ1_0, Encoding.TQ2_0),
)
_SCALE_BYTES = {  # of a block: where its halves of 16 bits stand
    Encoding.Q2_K: (80, 82),
    Encoding.Q3_K: (108,),
    Encoding.Q4_K: (0, 2),
    Encoding.Q5_K: (0, 2),
    Encoding.Q6_K: (208,),
    **dict.fromkeys(I_QUANTS, (0,)),
    Encoding.TQ1_0: (52,),
    Encoding.TQ2_0: (64,),
}
_HUGGING_FACE_NAMES = {"gemma3": "gemma3_text", "qwen3moe": "qwen3_moe"}
_GGUF_NAMES = {"mixtral": "llama"}


def encode(weight: np.ndarray, encoding: Encoding, seed: int) -> np.ndarray:
    """Rows of blocks. Those that the package cannot make are random, and stand for some weights."""
    if encoding not in _SCALE_BYTES:
        return np.asarray(gguf.quantize(weight, encoding))
    block, size = gguf.GGML_QUANT_SIZES[encoding]
    dice = np.random.default_rng(seed)
    blocks = dice.integers(0, 256, (weight.shape[0], weight.shape[1] // block, size), dtype=np.uint8)
    for place in _SCALE_BYTES[encoding]:
        scales = dice.uniform(0.0005, 0.002, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, place : place + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(weight.shape[0], -1)


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row i of the first half of each head before row i of its second half, as llama.cpp rotates them."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    architecture: str,
    *,
    encoding: Encoding = Encoding.F32,
    encodings: dict[str, Encoding] | None = None,
    packs_experts: bool = False,
    fields: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray | None] | None = None,
    **changes: Any,
) -> Any:
    """Write a random tiny model and return transformers' model with the weights that the file stands for.

    `fields` and `tensors` (GGUF's names; None leaves one out) replace what would be written. `encodings` (GGUF's names)
    are those of matrices that do not have `encoding`; experts have it if `packs_experts`.
    """
    folder = path.parent / f"{path.stem}-original"
    model = save_tiny_model(folder, _HUGGING_FACE_NAMES.get(architecture, architecture), **changes)
    config = model.config
    named = _GGUF_NAMES.get(architecture, architecture)
    writer = gguf.GGUFWriter(path, named)
    _write_fields(writer, architecture, config)
    for key, value in ((fields or {}) | _tokenizer_fields(tokenizer)).items():
        _write_field(writer, key, value)
    written: dict[str, tuple[np.ndarray, Encoding]] = {}
    state = model.state_dict()
    names = gguf.get_tensor_name_map(ARCHITECTURE_ENUM[named], config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for seed, (name, weight) in enumerate(sorted(state.items())):
        if tied and name == "lm_head.weight":
            continue
        values = weight.numpy()
        if ".experts." in name:
            kept = []
            for theirs, part in _expert_tensors(name, values):
                kind = (encodings or {}).get(theirs, encoding) if packs_experts else Encoding.F32
                rows = np.stack([encode(one, kind, seed) for one in part])
                kept.append(np.stack([gguf.dequantize(one, kind) for one in rows]))
                written[theirs] = rows, kind
            state[name].copy_(torch.from_numpy(np.concatenate(kept, axis=1)))
            continue
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        kind = (encodings or {}).get(theirs, encoding) if values.ndim > 1 else Encoding.F32
        rows = encode(values, kind, seed)
        if values.ndim > 1:
            state[name].copy_(torch.from_numpy(np.array(gguf.dequantize(rows, kind))))
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if architecture in INTERLEAVED and heads:
            rows = interleaved(rows, heads)
        written[theirs] = rows, kind
    for name, content in (tensors or {}).items():
        written.pop(name, None)
        if content is not None:
            written[name] = content, Encoding.F32
    for name, (rows, kind) in written.items():
        writer.add_tensor(name, rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if tied:
        model.tie_weights()
    return model


def _expert_tensors(name: str, values: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """One layer's experts: transformers 5 has gate and up of all of them in one tensor, GGUF in two."""
    block = f"blk.{name.split('.')[2]}"
    if name.endswith("down_proj"):
        return [(f"{block}.ffn_down_exps.weight", values)]
    gate, up = np.split(values, 2, axis=1)
    return [
        (f"{block}.ffn_gate_exps.weight", np.ascontiguousarray(gate)),
        (f"{block}.ffn_up_exps.weight", np.ascontiguousarray(up)),
    ]


def _write_fields(writer: gguf.GGUFWriter, architecture: str, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if (experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)) is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if (width := getattr(config, "moe_intermediate_size", None)) is not None:
        writer.add_expert_feed_forward_length(width)
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if architecture == "gemma3":
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if architecture.startswith("gemma") or (architecture == "phi3" and config.sliding_window):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _tokenizer_fields(tokenizer: dict[str, Any] | None) -> dict[str, Any]:
    chosen = dict(tokenizer) if tokenizer is not None else tiny_vocabulary()
    template = chosen.pop("chat_template", None)
    named = {f"tokenizer.ggml.{key}": value for key, value in chosen.items()}
    return named if template is None else named | {"tokenizer.chat_template": template}


def tiny_vocabulary() -> dict[str, Any]:
    """Bytes, a few merges and three control tokens: as many tokens as a tiny model has."""
    tokens = ["<unk>", "<s>", "</s>"] + [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ", "th", "the", "Ġthe"]
    tokens += [f"[PAD{index}]" for index in range(len(tokens), 199)]
    types = [3, 3, 3] + [5 if token.startswith("[PAD") else 1 for token in tokens[3:]]
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": types,
        "merges": ["t h", "th e", "Ġ the"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def _write_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
