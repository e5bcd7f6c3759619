"""Random tiny models in Hugging Face format, and the passes that tests run through a runner."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from safetensors.torch import save_file

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.core.result import PassResult
from mini_infer_engine.model_path import DEMO_DIRECTORY
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.runtime.cpu.executor import TorchExecutor
from mini_infer_engine.runtime.executor import PassHandle
from mini_infer_engine.runtime.model_runner import ModelRunner, make_runner
from mini_infer_engine.speculation.head import HeadShape, SpeculativeHead

GREEDY = SamplingParams(temperature=0.0)

_SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Wide weights: at the default of 0.02 every model of this size predicts its own input.
    "initializer_range": 0.2,
}


_FACTORS = [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1, 4.0]
LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": _FACTORS,
        "original_max_position_embeddings": 32,
    },
}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.05,
    "logits_scaling": 8.0,
}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
}
DEEPSEEK_YARN: dict[str, Any] = DEEPSEEK | {
    "q_lora_rank": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 2.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
}
"""V2's: yarn with mscale, queries from a latent, experts from the best groups; `DEEPSEEK` has V2-Lite's."""
DEEPSEEK_V3: dict[str, Any] = {name: value for name, value in DEEPSEEK_YARN.items() if name != "topk_method"}
GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 11,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}
GEMMA4_INPUTS: dict[str, Any] = GEMMA4 | {
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 210,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
"""E2B's and E4B's: an input for each layer, and layers that share keys and values."""
GEMMA4_MOE: dict[str, Any] = GEMMA4 | {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
"""26B-A4B's: experts beside the MLP, and keys that are values in full layers."""
GLM_MOE: dict[str, Any] = {
    "head_dim": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "attention_bias": True,
    "use_qk_norm": True,
}
MINIMAX_M2: dict[str, Any] = {
    "head_dim": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 40,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
}
DEEPSEEK_V32: dict[str, Any] = {name: value for name, value in DEEPSEEK_V3.items() if name != "head_dim"} | {
    "index_n_heads": 20,  # with few, scores of zero would tie, and transformers' choice depends on the pass
    "index_head_dim": 24,
    "index_topk": 8,
}
GPT_OSS: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 11}
GATED_DELTA: dict[str, Any] = {
    # Gated norms enlarge the rounding of small outputs: at 0.2 transformers' chunks and its steps differ by 5e-4.
    "initializer_range": 0.06,
    "num_hidden_layers": 4,
    "full_attention_interval": 3,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 40,
}
MAMBA: dict[str, Any] = {
    "initializer_range": 0.1,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "shared_intermediate_size": 72,
    **GRANITE,
}
NEMOTRON: dict[str, Any] = {
    "initializer_range": 0.1,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
    "head_dim": 24,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 12,
    "n_groups": 2,
}
NEMOTRON_MOE: dict[str, Any] = NEMOTRON | {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}
LFM2: dict[str, Any] = {
    "layer_types": ["conv", "full_attention", "conv"],
    "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.5,
}
GATED_MOE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
LONGROPE_PARTIAL: dict[str, Any] = {
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 6,
        "long_factor": _FACTORS[2:],
        "original_max_position_embeddings": 32,
        "partial_rotary_factor": 0.75,
    },
}


def save_tiny_model(directory: Path, architecture: str, *, shard_size: str = "1GB", **changes: Any) -> Any:
    """Save a random model of `architecture` ("qwen3", ...) into `directory` and return it, in fp32."""
    torch.manual_seed(7)
    shape = _SHAPE | ({"head_dim": 24} if architecture in ("qwen3", "llama", "mistral") else {}) | changes
    config = transformers.AutoConfig.for_model(architecture, **shape)
    eager = {"attn_implementation": "eager"} if architecture == "gemma2" else {}  # torch's own has no soft cap
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **eager).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(("bias", "router.scale", "per_expert_scale")):
                parameter.uniform_(0.5, 1.5)  # transformers' ones and zeros would hide that they are not loaded
            elif name.endswith("sinks"):
                parameter.uniform_(-2.0, 4.0)  # from nearly nothing to most of the softmax
            elif name.endswith("A_log"):
                parameter.uniform_(-3.0, 0.0)  # sums of faster decays are inexact in fp32
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):
                buffer.uniform_(-0.3, 0.3)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model.save_pretrained(directory, max_shard_size=shard_size)
    return model


def save_tiny_model_with_text(directory: Path, architecture: str, **changes: Any) -> None:
    """Such a model that is asked by text: with the demo model's tokenizer, whose vocabulary it has."""
    shape = {"vocab_size": 4096, "max_position_embeddings": 2048}
    save_tiny_model(directory, architecture, **(shape | changes))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO_DIRECTORY / name, directory / name)


def save_head(folder: Path, hidden_size: int, num_layers: int, token_ids: Sequence[int] = ()) -> Path:
    """An untrained head for a model of these sizes: what it guesses, of `token_ids` or of all, is seldom right."""
    folder.mkdir()
    layers, count = (0, num_layers - 1), len(token_ids) or None
    shape = HeadShape(hidden_size, width=32, intermediate_size=48, layers=layers, draft_vocab_size=count)
    torch.manual_seed(5)
    head = SpeculativeHead(shape)
    if token_ids:
        head.d2t.copy_(torch.tensor(token_ids) - torch.arange(len(token_ids)))
    save_file(head.state_dict(), str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(shape.to_config()))
    return folder


def tiny_runner(directory: Path, **settings: Any) -> ModelRunner:
    """A CPU runner for a model folder, with a pool of a few megabytes and one page table for all layers."""
    defaults = {"device": "cpu", "kv_cache_memory": 16_000_000, "max_num_seqs": 16}
    defaults |= {"disable_hybrid_kv_cache_manager": True}
    engine_settings = EngineSettings(model=str(directory), **(defaults | settings))
    return make_runner(engine_settings, read_config(directory, reads_images=True), directory, TorchExecutor)


def sampled(result: PassResult) -> list[int | None]:
    """The one token of each row, None where nothing was sampled."""
    assert all(len(tokens) <= 1 for tokens in result.tokens)
    return [tokens[0] if tokens else None for tokens in result.tokens]


class PageDealer:
    """Hands out each page of a runner once, in an order that has nothing to do with positions."""

    def __init__(self, runner: ModelRunner) -> None:
        order = torch.randperm(runner.num_pages, generator=torch.Generator().manual_seed(3)).tolist()
        self.pages: Iterator[int] = iter(order)
        self.page_size = runner.page_size

    def table(self, num_tokens: int) -> list[int]:
        """Pages for `num_tokens` tokens."""
        return [next(self.pages) for _ in range(-(-num_tokens // self.page_size))]


@contextmanager
def shifted_positions(offset: int) -> Iterator[None]:
    """All runners are told that sequences stand `offset` positions further on in their texts than in their caches."""
    launch = ModelRunner.launch

    def launch_shifted(runner: ModelRunner, batch: Batch) -> PassHandle:
        for row in (*batch.rows, *batch.catch_up):
            row.position_offset = offset
        return launch(runner, batch)

    with patch.object(ModelRunner, "launch", launch_shifted):
        yield


def chunk(slot: int, tokens: list[int], start: int, count: int, table: list[int], **fields: Any) -> Row:
    """`count` tokens of a sequence whose tokens the host knows."""
    fields.setdefault("sampling", None)
    return Row(slot, start, count, tokens[start : start + count], table, **fields)


def run_chunks(
    runner: ModelRunner, tokens: list[int], table: list[int], sizes: list[int], positions: Sequence[int] | None = None
) -> torch.Tensor:
    """Logits of every token of one sequence, computed in chunks of `sizes`; [tokens, vocab].

    `positions`: of the tokens, consecutive within each chunk; without them from 0 on.
    """
    parts, start = [], 0
    for size in sizes:
        # One token at a time is what decoding looks like; more is a prefill chunk.
        row = chunk(0, tokens, start, size, table, sampling=GREEDY if size == 1 else None)
        row.position_offset = 0 if positions is None else positions[start] - start
        parts.append(runner.logits(Batch([row], int(size == 1))))
        start += size
    return torch.cat(parts)


def reference_logits(model: Any, tokens: list[int], positions: Sequence[int] | None = None) -> torch.Tensor:
    """What transformers computes for a sequence whose tokens stand at `positions`, or from 0 on; [tokens, vocab]."""
    options: dict[str, Any] = {}
    if positions is not None:  # without a mask it would take a gap for the beginning of another sequence
        options = {"position_ids": torch.tensor([positions]), "attention_mask": torch.ones(1, len(tokens))}
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens]), **options).logits[0]
    return logits
