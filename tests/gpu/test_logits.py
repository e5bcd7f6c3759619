"""Logits of random models of every architecture against transformers, teacher-forced, through the kernels.

fp32 is held to a fixed bound; bf16 to the error that transformers itself makes in bf16.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.runtime.cuda.executor import CudaExecutor
from tests.engine.models.test_models import VARIANTS as SHAPES
from tests.gpu.device import DEVICE, GPU_ONLY
from tests.gpu.runs import make_runner, make_settings
from tests.support.tiny_models import (
    DEEPSEEK,
    DEEPSEEK_V3,
    DEEPSEEK_YARN,
    GATED_MOE,
    GEMMA4,
    GEMMA4_INPUTS,
    GEMMA4_MOE,
    GLM_MOE,
    GPT_OSS,
    GRANITE,
    GREEDY,
    LONGROPE_PARTIAL,
    MINIMAX_M2,
    PageDealer,
    chunk,
    reference_logits,
    run_chunks,
    sampled,
    save_tiny_model,
)

pytestmark = GPU_ONLY
TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(150)]
FP32_TOLERANCE = 3e-4
"""The CPU's is 1e-4; a GPU's exponential and reciprocal root are a few units less exact."""
WEIGHT_ERROR = 1e-6
"""Relative; what such a change of the weights does to the logits is allowed, too: some random models (Gemma 2 with one
wide KV head, Mixtral) are so ill-conditioned that transformers' own fp32 is 4e-4 from its fp64."""
BF16_ALLOWANCE = 1.5
"""Times the root mean square of transformers' own bf16 error."""

WIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-seven-heads": (
        "qwen2",
        {"hidden_size": 448, "num_attention_heads": 7, "num_key_value_heads": 1, "initializer_range": 0.07},
    ),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 128}),
    "qwen3-biased": ("qwen3", {"attention_bias": True, "num_key_value_heads": 4}),
    "llama": ("llama", {"head_dim": 96}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    # Wide enough that GEMMs of many rows run as split-K.
    "qwen3-wide": ("qwen3", {"intermediate_size": 2048}),
    "llama-wide-biased": ("llama", {"intermediate_size": 1024, "mlp_bias": True}),
    "gemma3": ("gemma3_text", {"head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 24}),
    "gemma3-wide-heads": (
        "gemma3_text",
        {"head_dim": 256, "sliding_window": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
    ),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "num_experts": 24,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 80,
            "norm_topk_prob": True,
            "head_dim": 64,
            "hidden_size": 128,
        },
    ),
    "phi3": ("phi3", {"original_max_position_embeddings": 512}),
    "phi4-mini": ("phi3", LONGROPE_PARTIAL),
    "gemma2": ("gemma2", {"head_dim": 32, "sliding_window": 24, "attn_logit_softcapping": 2.0}),
    "gemma2-wide-heads": (
        "gemma2",
        {"head_dim": 256, "sliding_window": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
    ),
    "gpt-oss": ("gpt_oss", {**GPT_OSS, "head_dim": 64, "sliding_window": 24, "hidden_size": 128}),
    "gemma4": ("gemma4_text", GEMMA4 | {"head_dim": 64, "global_head_dim": 128, "hidden_size": 128}),
    "gemma4-wide-heads": (
        "gemma4_text",
        GEMMA4_INPUTS | {"head_dim": 256, "global_head_dim": 512, "sliding_window": 64, "num_key_value_heads": 1},
    ),
    "gemma4-moe": ("gemma4_text", GEMMA4_MOE | {"head_dim": 64, "global_head_dim": 128, "hidden_size": 128}),
    "glm": ("glm", {"head_dim": 64}),
    "glm4": ("glm4", {"head_dim": 64}),
    "glm4-moe": ("glm4_moe", GLM_MOE | {"head_dim": 64, "hidden_size": 128}),
    "minimax-m2": ("minimax_m2", MINIMAX_M2 | {"head_dim": 64, "hidden_size": 128}),
    "olmo2": ("olmo2", {}),
    "mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "hidden_size": 128}),
    "granite": ("granite", GRANITE),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "deepseek-v2-lite": ("deepseek_v2", DEEPSEEK | {"hidden_size": 128}),
    "deepseek-v2": (
        "deepseek_v2",
        DEEPSEEK_YARN | {"hidden_size": 160, "num_attention_heads": 20, "num_key_value_heads": 20},
    ),
    "deepseek-v3": ("deepseek_v3", DEEPSEEK_V3 | {"hidden_size": 128}),
    "glm4-moe-lite": ("glm4_moe_lite", DEEPSEEK_V3 | {"hidden_size": 128, "n_group": 1, "topk_group": 1}),
    "dots1": ("dots1", GLM_MOE | {"head_dim": 64, "hidden_size": 128, "sliding_window": 24, "max_window_layers": 2}),
    "seed-oss": ("seed_oss", {"head_dim": 64}),
    "exaone4": ("exaone4", {"sliding_window": 24, "sliding_window_pattern": 3}),
    "olmo3": ("olmo3", {"sliding_window": 24, "num_hidden_layers": 4}),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 2, "hidden_size": 128}),
    "qwen2-moe": ("qwen2_moe", GATED_MOE | {"hidden_size": 128}),
    "ernie4.5-moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_intermediate_size": 80,
            "hidden_size": 128,
            "moe_num_shared_experts": 1,
        },
    ),
    "mistral-window": ("mistral", {"sliding_window": 24, "head_dim": 64}),
}
"""Shapes beside those of a CPU's test: wide enough for tiles, splits and windows of the kernels."""
VARIANTS = SHAPES | WIDE


@pytest.fixture(params=VARIANTS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    architecture, changes = VARIANTS[request.param]
    return tmp_path, save_tiny_model(tmp_path, architecture, **changes)


def test_fp32_logits_whole_chunked_and_token_by_token(saved: tuple[Path, Any]) -> None:
    directory, model = saved
    expected = reference_logits(model, TOKENS)
    runner = make_runner(make_settings(directory, enforce_eager=True, page_size=16))
    dealer = PageDealer(runner)
    allowed = max(FP32_TOLERANCE, effect_of_weight_errors(model, expected))
    for sizes in ([150], [33, 1, 116], [16, 16, 16, 102], [5] + [1] * 30 + [115]):
        actual = run_chunks(runner, TOKENS, dealer.table(150), sizes).cpu()
        assert (actual - expected).abs().max() <= allowed, sizes


def effect_of_weight_errors(model: Any, expected: torch.Tensor) -> float:
    """The largest change of a logit when every weight is off by about `WEIGHT_ERROR` of itself."""
    random = torch.Generator().manual_seed(0)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for weight in changed.parameters():
            weight.mul_(1 + WEIGHT_ERROR * torch.randn(weight.shape, generator=random))
    return float((reference_logits(changed, TOKENS) - expected).abs().max())


def test_bf16_error_is_no_larger_than_that_of_transformers(saved: tuple[Path, Any]) -> None:
    directory, model = saved
    expected = reference_logits(model, TOKENS)
    with torch.inference_mode():
        narrow = model.to(DEVICE, torch.bfloat16)
        theirs = narrow(torch.tensor([TOKENS], device=DEVICE)).logits[0].float().cpu() - expected
    allowed = BF16_ALLOWANCE * theirs.square().mean().sqrt()
    runner = make_runner(make_settings(directory, dtype="bfloat16", enforce_eager=True))
    dealer = PageDealer(runner)
    for sizes in ([150], [64, 1, 85], [100] + [1] * 50):
        ours = run_chunks(runner, TOKENS, dealer.table(150), sizes).float().cpu() - expected
        assert ours.square().mean().sqrt() <= allowed, sizes


@pytest.mark.parametrize("variant", ["qwen3-tied", "gemma2", "deepseek-v2-lite"])
def test_tokens_behind_a_gap_are_rotated_by_position_and_cached_by_index(variant: str, tmp_path: Path) -> None:
    """As if some tokens before them had been evicted; kernel by kernel, then by graphs of prompts and decode steps."""
    architecture, changes = VARIANTS[variant]
    model = save_tiny_model(tmp_path, architecture, **changes)
    gap, positions = 77, [*range(60), *range(137, 227)]
    expected = reference_logits(model, TOKENS, positions)
    allowed = max(FP32_TOLERANCE, effect_of_weight_errors(model, reference_logits(model, TOKENS)))
    runner = make_runner(make_settings(tmp_path, max_num_seqs=4, page_size=16))
    executor, dealer = runner.executor, PageDealer(runner)
    assert isinstance(executor, CudaExecutor)
    for sizes in ([60, 90], [33, 27, 1, 89], [60] + [1] * 30 + [60]):
        actual = run_chunks(runner, TOKENS, dealer.table(150), sizes, positions).cpu()
        assert (actual - expected).abs().max() <= allowed, sizes
    table, state = dealer.table(150), executor.state.state
    rows = [
        chunk(0, TOKENS, 0, 60, table, sampling=GREEDY),
        chunk(0, TOKENS, 60, 40, table, sampling=GREEDY, position_offset=gap),
        *[Row(0, 100 + step, 1, None, table, GREEDY, output_index=step, position_offset=gap) for step in range(1, 50)],
    ]
    rows[2:2] = [chunk(0, TOKENS, 100, 1, table, sampling=GREEDY, position_offset=gap)]
    for row in rows:
        if row.token_ids is None:
            state.last_tokens[0] = TOKENS[row.start]  # the text goes on as it stands here
        runner.collect(runner.launch(Batch([row], int(row.token_ids is None))))
        logits = executor.sampling.logits[0].float().cpu()
        assert (logits - expected[row.start + row.count - 1]).abs().max() <= allowed, row.start


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_graphs_compute_what_transformers_does(architecture: str, dtype: str, tmp_path: Path) -> None:
    """Three sequences, prefilled by a graph, then decoded by graphs; each step's logits, for the text they make."""
    model = save_tiny_model(tmp_path, architecture)
    runner = make_runner(make_settings(tmp_path, dtype=dtype, max_num_seqs=4))
    executor = runner.executor
    assert isinstance(executor, CudaExecutor)
    dealer = PageDealer(runner)
    prompts = [TOKENS[:20], TOKENS[7:72], TOKENS[3:4]]
    tables = [dealer.table(len(prompt) + 20) for prompt in prompts]
    rows = [
        chunk(slot, prompt, 0, len(prompt), table, sampling=GREEDY)
        for slot, (prompt, table) in enumerate(zip(prompts, tables, strict=True))
    ]
    made = [sampled(runner.collect(runner.launch(Batch(rows, 0))))]
    logits = []
    for step in range(1, 20):
        rows = [
            Row(slot, len(prompt) + step - 1, 1, None, table, GREEDY, output_index=step)
            for slot, (prompt, table) in enumerate(zip(prompts, tables, strict=True))
        ]
        made.append(sampled(runner.collect(runner.launch(Batch(rows, 3)))))
        logits.append(executor.sampling.logits[:3].float().cpu())
    narrow = copy.deepcopy(model).to(DEVICE, torch.bfloat16)
    ours, theirs = [], []
    for slot, prompt in enumerate(prompts):
        answer = [step[slot] for step in made]
        assert None not in answer
        tokens = prompt + [token for token in answer if token is not None]
        expected = reference_logits(model, tokens)[len(prompt) - 1 : -1]
        if dtype == "float32":
            assert expected.argmax(-1).tolist() == answer
        ours.append(torch.stack([step[slot] for step in logits]) - expected[1:])
        with torch.inference_mode():
            rounded = narrow(torch.tensor([tokens], device=DEVICE)).logits[0].float().cpu()
        theirs.append(rounded[len(prompt) : -1] - expected[1:])
    if dtype == "float32":
        assert torch.cat(ours).abs().max() <= FP32_TOLERANCE
    else:
        assert torch.cat(ours).square().mean().sqrt() <= BF16_ALLOWANCE * torch.cat(theirs).square().mean().sqrt()
