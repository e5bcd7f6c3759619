"""Tiny random checkpoints of architectures that run through transformers, and the text `generate` makes of them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

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
_EXPERTS = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_ROUTED = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "first_k_dense_replace": 1}
_WINDOWS = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
_ALL_WINDOWS = {"sliding_window": 24}
_HEAD = {"head_dim": 16}


@dataclass(frozen=True)
class Served:
    """An architecture that runs through transformers, as a tiny config."""

    architecture: str
    """The class in `architectures` of config.json."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields that differ from the common shape."""
    std: float = 0.2
    """Standard deviation of the weights: at transformers' 0.02 models of this size repeat one token."""


MODELS: dict[str, Served] = {
    "apertus": Served("ApertusForCausalLM", std=0.1),
    "arcee": Served("ArceeForCausalLM"),
    "afmoe": Served("AfmoeForCausalLM", {**_EXPERTS, **_HEAD, **_WINDOWS}),
    "biogpt": Served("BioGptForCausalLM", {"tie_word_embeddings": False}),
    "bitnet": Served("BitNetForCausalLM"),
    "cohere": Served("CohereForCausalLM"),
    "cohere2": Served("Cohere2ForCausalLM", _WINDOWS),
    "ctrl": Served("CTRLLMHeadModel", {"tie_word_embeddings": False}),
    "cwm": Served("CwmForCausalLM", {**_HEAD, **_WINDOWS}),
    "diffllama": Served("DiffLlamaForCausalLM"),
    "dots1": Served("Dots1ForCausalLM", {**_ROUTED, **_HEAD, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}),
    "ernie4_5": Served("Ernie4_5ForCausalLM", _HEAD),
    "ernie4_5_moe": Served("Ernie4_5_MoeForCausalLM", {**_EXPERTS, "moe_num_experts": 6, "moe_k": 2}),
    "exaone4": Served("Exaone4ForCausalLM", _WINDOWS),
    "flex_olmo": Served("FlexOlmoForCausalLM", _EXPERTS),
    "gemma": Served("GemmaForCausalLM", _HEAD),
    "glm": Served("GlmForCausalLM", _HEAD),
    "glm4": Served("Glm4ForCausalLM", _HEAD),
    "glm4_moe": Served("Glm4MoeForCausalLM", {**_ROUTED, **_HEAD, "n_group": 1, "topk_group": 1}),
    "gpt2": Served("GPT2LMHeadModel"),
    "gpt_bigcode": Served("GPTBigCodeForCausalLM"),
    "gpt_neox": Served("GPTNeoXForCausalLM"),
    "granitemoe": Served("GraniteMoeForCausalLM", _EXPERTS),
    "granitemoeshared": Served("GraniteMoeSharedForCausalLM", {**_EXPERTS, "shared_intermediate_size": 32}),
    "helium": Served("HeliumForCausalLM", _HEAD),
    "hunyuan_v1_dense": Served("HunYuanDenseV1ForCausalLM", _HEAD),
    "hunyuan_v1_moe": Served("HunYuanMoEV1ForCausalLM", {**_HEAD, "num_experts": 4, "moe_topk": 2}),
    "hyperclovax": Served("HyperCLOVAXForCausalLM"),
    "jais2": Served("Jais2ForCausalLM"),
    "minimax_m2": Served("MiniMaxM2ForCausalLM", {**_EXPERTS, **_HEAD, "rotary_dim": 8}),
    "ministral": Served("MinistralForCausalLM", {**_HEAD, **_ALL_WINDOWS}),
    "ministral3": Served("Ministral3ForCausalLM", _HEAD),
    "modernbert-decoder": Served("ModernBertDecoderForCausalLM", {"local_attention": 24}),
    "nanochat": Served("NanoChatForCausalLM"),
    "nemotron": Served("NemotronForCausalLM"),
    "olmo": Served("OlmoForCausalLM"),
    "olmo3": Served("Olmo3ForCausalLM", _WINDOWS),
    "olmoe": Served("OlmoeForCausalLM", _EXPERTS),
    "opt": Served("OPTForCausalLM", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "persimmon": Served("PersimmonForCausalLM", std=0.1),
    "phi": Served("PhiForCausalLM"),
    "phimoe": Served("PhimoeForCausalLM", _EXPERTS),
    "qwen2_moe": Served("Qwen2MoeForCausalLM", {**_EXPERTS, "shared_expert_intermediate_size": 32}),
    "seed_oss": Served("SeedOssForCausalLM", _HEAD),
    "solar_open": Served("SolarOpenForCausalLM", {**_ROUTED, **_HEAD, "n_group": 1, "topk_group": 1}),
    "stablelm": Served("StableLmForCausalLM"),
    "starcoder2": Served("Starcoder2ForCausalLM", _ALL_WINDOWS),
    "vaultgemma": Served("VaultGemmaForCausalLM", {**_HEAD, **_WINDOWS}),
    "hrm_text": Served("HrmTextForCausalLM", _HEAD),
    "laguna": Served("LagunaForCausalLM", {**_EXPERTS, **_HEAD}),
    "mellum": Served("MellumForCausalLM", {**_EXPERTS, **_HEAD}),
    "cohere2_moe": Served("Cohere2MoeForCausalLM", {**_EXPERTS, **_WINDOWS}),
    "exaone_moe": Served("ExaoneMoeForCausalLM", {**_EXPERTS, **_WINDOWS}),
    "hy_v3": Served("HYV3ForCausalLM", {**_EXPERTS, **_HEAD}),
}
"""By model_type."""


@dataclass(frozen=True)
class Refused:
    """An architecture that does not run through transformers."""

    model_type: str
    architecture: str
    reason: str
    """What docs/models.md says."""
    named: str
    """A part of the error."""
    changes: dict[str, Any] = field(default_factory=dict)


_INTERFACE = ("its attention does not go through transformers' interface", "attention interface")
_STATE = ("its layers keep a state that is no attention", "linear_attention")
REFUSED: dict[str, Refused] = {
    "alibi": Refused("bloom", "BloomForCausalLM", *_INTERFACE),
    "alibi of MPT": Refused("mpt", "MptForCausalLM", *_INTERFACE),
    "Falcon": Refused("falcon", "FalconForCausalLM", *_INTERFACE),
    "GPT-J": Refused("gptj", "GPTJForCausalLM", *_INTERFACE),
    "GPT-Neo": Refused(
        "gpt_neo", "GPTNeoForCausalLM", *_INTERFACE, {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}
    ),
    "CodeGen": Refused("codegen", "CodeGenForCausalLM", *_INTERFACE, {"n_ctx": 64, "rotary_dim": 8}),
    "XGLM": Refused("xglm", "XGLMForCausalLM", *_INTERFACE, {"d_model": 64, "attention_heads": 4, "num_layers": 2}),
    "Mamba": Refused("mamba", "MambaForCausalLM", *_STATE),
    "RWKV": Refused("rwkv", "RwkvForCausalLM", "it keeps a recurrent state", "state"),
    "gated delta net": Refused(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        *_STATE,
        {"layer_types": ["linear_attention", "full_attention"], "num_experts": 4},
    ),
    "latent attention": Refused(
        "minicpm3", "MiniCPM3ForCausalLM", "latent attention, whose keys and values differ in width", "latent attention"
    ),
    "sinks": Refused(
        "gpt_oss", "GptOssForCausalLM", "attention sinks, which the kernels lack yet", "s_aux", {"num_local_experts": 4}
    ),
    "sparse": Refused("deepseek_v32", "DeepseekV32ForCausalLM", "an indexer chooses the keys it reads", "indices"),
    "experts by value": Refused(
        "dbrx",
        "DbrxForCausalLM",
        "its experts are chosen by values that the host reads",
        "experts",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "own mask": Refused("doge", "DogeForCausalLM", "a mask of its own", "mask", {"num_experts": 16}),
    "chunks": Refused("llama4_text", "Llama4ForCausalLM", "attention in chunks", "mask", {"num_key_value_heads": 2}),
    "encoder": Refused("bert", "BertLMHeadModel", "an encoder: tokens see what comes after them", "causal"),
    "widths": Refused(
        "gemma4_unified_text",
        "Gemma4UnifiedForCausalLM",
        "heads of different widths in different layers",
        "head_dim",
        {"head_dim": 16, "global_head_dim": 32, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
"""By what is in the way."""


def save_config(directory: Path, refused: Refused) -> None:
    """Writes the config of a tiny model, without weights."""
    shape = {"vocab_size": 99, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = transformers.AutoConfig.for_model(refused.model_type, **(shape | refused.changes))
    fields = config.to_diff_dict() | {"architectures": [refused.architecture], "model_type": refused.model_type}
    (directory / "config.json").write_text(json.dumps(fields))


def save_model(directory: Path, model_type: str) -> Any:
    """Saves a random model of this type into `directory`, and returns it."""
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(model_type, **(_SHAPE | MODELS[model_type].changes))
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
