"""Tiny random checkpoints of architectures that run through transformers, and the text `generate` makes of them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from mini_infer_engine.config.model.transformers_architectures import THROUGH_TRANSFORMERS

_SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_ROUTED = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1}
_WINDOWS = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
_ALL_WINDOWS = {"sliding_window": 24}
_HEAD = {"head_dim": 16}


@dataclass(frozen=True)
class Served:
    """An architecture that runs through transformers, as a tiny config."""

    changes: dict[str, Any] = field(default_factory=dict)
    """Fields that differ from the common shape."""
    std: float = 0.2
    """Standard deviation of the weights: at transformers' 0.02 models of this size repeat one token."""
    ranks: tuple[int, ...] = (2, 4)
    """The sizes of tensor-parallel groups that can divide this shape."""


MODELS: dict[str, Served] = {
    "apertus": Served(std=0.1),
    "arcee": Served(),
    "afmoe": Served({**_EXPERTS, **_HEAD, **_WINDOWS}, ranks=(2,)),
    "bloom": Served({"seq_length": 512, "tie_word_embeddings": False}),
    "codegen": Served({"rotary_dim": 8, "n_positions": 512, "n_ctx": 512}),
    "falcon": Served({"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt_neo": Served(
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 24}
    ),
    "gptj": Served({"rotary_dim": 8, "n_positions": 512}),
    "mpt": Served({"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512, "tie_word_embeddings": False}),
    "xglm": Served({"d_model": 64, "attention_heads": 4, "num_layers": 2, "ffn_dim": 96, "tie_word_embeddings": False}),
    "biogpt": Served({"tie_word_embeddings": False}),
    "bitnet": Served(),
    "cohere": Served(),
    "cohere2": Served(_WINDOWS),
    "ctrl": Served({"tie_word_embeddings": False}),
    "cwm": Served({**_HEAD, **_WINDOWS}),
    "diffllama": Served(),
    "dots1": Served({**_ROUTED, **_HEAD, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}),
    "ernie4_5": Served(_HEAD),
    "ernie4_5_moe": Served({**_EXPERTS, "moe_num_experts": 6, "moe_k": 2}),
    "exaone4": Served(_WINDOWS),
    "flex_olmo": Served(_EXPERTS),
    "gemma": Served(_HEAD),
    "glm": Served(_HEAD),
    "glm4": Served(_HEAD),
    "glm4_moe": Served({**_ROUTED, **_HEAD, "n_group": 1, "topk_group": 1}),
    "gpt2": Served(),
    "gpt_bigcode": Served(),
    "gpt_neox": Served(),
    "granite_swa": Served(_WINDOWS),
    "granitemoe": Served(_EXPERTS),
    "granitemoe_swa": Served({**_EXPERTS, **_WINDOWS}),
    "granitemoeshared": Served({**_EXPERTS, "shared_intermediate_size": 32}),
    "helium": Served(_HEAD),
    "hunyuan_v1_dense": Served(_HEAD),
    "hunyuan_v1_moe": Served({**_HEAD, "num_experts": 4, "moe_topk": 2}),
    "hyperclovax": Served(),
    "jais2": Served(),
    "minimax_m2": Served({**_EXPERTS, **_HEAD, "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}}),
    "ministral": Served({**_HEAD, **_ALL_WINDOWS}),
    "ministral3": Served(_HEAD),
    "modernbert-decoder": Served({"local_attention": 24}),
    "nanochat": Served(),
    "nemotron": Served(),
    "olmo": Served(),
    "olmo3": Served(_WINDOWS),
    "olmoe": Served(_EXPERTS),
    "opt": Served({"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "persimmon": Served(std=0.1),
    "phi": Served(),
    "phimoe": Served(_EXPERTS, ranks=(2,)),
    "qwen2_moe": Served({**_EXPERTS, "shared_expert_intermediate_size": 32}, ranks=(2,)),
    "seed_oss": Served(_HEAD),
    "solar_open": Served({**_ROUTED, **_HEAD, "n_group": 1, "topk_group": 1}),
    "stablelm": Served(),
    "starcoder2": Served(_ALL_WINDOWS),
    "vaultgemma": Served({**_HEAD, **_WINDOWS}),
    "hrm_text": Served(_HEAD),
    "laguna": Served({**_EXPERTS, **_HEAD}),
    "mellum": Served({**_EXPERTS, **_HEAD}),
    "cohere2_moe": Served({**_EXPERTS, **_WINDOWS}, ranks=(2,)),
    "exaone_moe": Served({**_EXPERTS, **_WINDOWS}, ranks=(2,)),
    "hy_v3": Served({**_EXPERTS, **_HEAD}),
}
"""By model_type: a shape for each of `THROUGH_TRANSFORMERS`."""
OTHER_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon, one key": ("falcon", {"new_decoder_architecture": False, "multi_query": True}),
    "falcon, alibi": (
        "falcon",
        {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 4, "alibi": True, "bias": True},
    ),
    "gptj, whole heads": ("gptj", {"rotary_dim": 16}),
    "mpt, clipped": ("mpt", {"n_heads": 2, "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}}),
    "bloom, six heads": (
        "bloom",
        {"hidden_size": 96, "num_attention_heads": 6, "apply_residual_connection_post_layernorm": True},
    ),
}
"""Further shapes of models whose attention is replaced, by what differs."""
ARCHITECTURES = {each.model_type: name for name, each in THROUGH_TRANSFORMERS.items()}
"""The class in `architectures` of config.json by model_type."""
SHARDED = sorted(each.model_type for each in THROUGH_TRANSFORMERS.values() if each.tensor_parallel)
UNSHARDED = sorted(each.model_type for each in THROUGH_TRANSFORMERS.values() if not each.tensor_parallel)
"""The models for which transformers has no plan of tensor parallelism."""


@dataclass(frozen=True)
class Refused:
    """An architecture that does not run through transformers."""

    model_type: str
    architecture: str
    named: str
    """A part of the error."""
    changes: dict[str, Any] = field(default_factory=dict)


_INTERFACE, _STATE = "attention interface", "linear_attention"
REFUSED: dict[str, Refused] = {
    "own attention": Refused("openai-gpt", "OpenAIGPTLMHeadModel", _INTERFACE),
    "Mamba": Refused("mamba", "MambaForCausalLM", _STATE),
    "RWKV": Refused("rwkv", "RwkvForCausalLM", "state"),
    "gated delta net": Refused(
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        _STATE,
        {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "latent attention": Refused("minicpm3", "MiniCPM3ForCausalLM", "latent attention"),
    "experts by value": Refused(
        "dbrx",
        "DbrxForCausalLM",
        "experts",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "own mask": Refused("doge", "DogeForCausalLM", "mask", {"num_experts": 16}),
    "chunks": Refused("llama4_text", "Llama4ForCausalLM", "mask", {"num_key_value_heads": 2}),
    "encoder": Refused("bert", "BertLMHeadModel", "causal"),
}
"""By what is in the way."""
SPARSE = Refused("deepseek_v32", "DeepseekV32ForCausalLM", "indices", {"num_key_value_heads": 4})
"""An indexer that chooses the keys, which a file of ours computes."""
WIDTHS = Refused(
    "gemma4_unified_text",
    "Gemma4UnifiedForCausalLM",
    "head_dim",
    {"head_dim": 16, "global_head_dim": 32, "layer_types": ["sliding_attention", "full_attention"]},
)
"""Heads of different widths, which a file of ours computes."""


def save_config(directory: Path, refused: Refused) -> None:
    """Writes the config of a tiny model, without weights."""
    shape = {"vocab_size": 99, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = transformers.AutoConfig.for_model(refused.model_type, **(shape | refused.changes))
    fields = config.to_diff_dict() | {"architectures": [refused.architecture], "model_type": refused.model_type}
    (directory / "config.json").write_text(json.dumps(fields))


def save_model(directory: Path, model_type: str, **changes: Any) -> Any:
    """Saves a random model of this type into `directory`, and returns it."""
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(model_type, **(_SHAPE | MODELS[model_type].changes | changes))
    config.dtype = torch.float32
    eager = {"attn_implementation": "eager"} if model_type == "vaultgemma" else {}  # torch's own has no soft cap
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **eager).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, MODELS[model_type].std)
            elif name.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)  # transformers' zeros would hide that they are not loaded
            else:
                parameter.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.uniform_(-0.3, 0.3)
    model.save_pretrained(directory)
    return model


def expected_tokens(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Returns the tokens that transformers' greedy `generate` appends to the prompt."""
    inputs = torch.tensor([list(prompt)])
    with torch.inference_mode():
        made = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
        )
    tokens: list[int] = made[0, len(prompt) :].tolist()
    return tokens
