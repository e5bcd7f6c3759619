"""Whole passes of the GPU's executor on a CPU, by Triton's interpreter: what can be known of them without a GPU.

On a GPU test_logits.py and test_same_text.py do the same with captured graphs. Here a graph is the function that it
records.
"""

import gc
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")
pytest.importorskip("gguf", reason="needs the package gguf, by which files are written")

from gguf import GGMLQuantizationType as Encoding

from mini_infer_engine.communication.rank_group import ALONE_IN_GROUP, RankGroup
from mini_infer_engine.core.batch import Batch, PageCopy, Row, TokenMasks, Transfers
from mini_infer_engine.core.encoder_cache import EncoderCacheManager
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.grammars.matcher import mask_of
from mini_infer_engine.core.images import PromptImages
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core.result import PassResult
from mini_infer_engine.gguf.folder import model_folder
from mini_infer_engine.kernels.all_reduce import overlapped_sum
from mini_infer_engine.kernels.attention import attention_config
from mini_infer_engine.kernels.attention.attention_config import PrefillConfig
from mini_infer_engine.kernels.attention.prefill_attention import prefill_attention
from mini_infer_engine.kernels.gemm import grouped_weight_gemm
from mini_infer_engine.kernels.policy import KernelPolicy
from mini_infer_engine.kernels.workspace import Workspace
from mini_infer_engine.layers import linear
from mini_infer_engine.layers.grouped import GroupedMethod
from mini_infer_engine.layers.packed import PackedMethod
from mini_infer_engine.quantization import fp4, integer
from mini_infer_engine.runtime import memory_plan
from mini_infer_engine.runtime.cuda import captured_graphs
from mini_infer_engine.runtime.cuda import executor as cuda_executor
from mini_infer_engine.runtime.cuda import graphs as cuda_graphs
from mini_infer_engine.runtime.cuda import sampling as cuda_sampling
from mini_infer_engine.runtime.cuda.executor import CudaExecutor
from mini_infer_engine.runtime.model_runner import ModelRunner
from tests.gpu.device import INTERPRETED
from tests.gpu.runs import make_runner, make_settings, texts
from tests.support.copying_peers import CopyingPeers
from tests.support.fp4_checkpoints import quantize_folder as quantize_to_fp4
from tests.support.gguf_files import write_gguf
from tests.support.integer_checkpoints import quantize_folder as quantize_to_integers
from tests.support.mixed_checkpoints import Group
from tests.support.mixed_checkpoints import quantize_folder as quantize_mixed
from tests.support.thread_group import StageAlone, StagesInTurn, TableInTurns, ThreadRank, thread_links
from tests.support.tiny_models import (
    DEEPSEEK,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GATED_DELTA,
    GATED_MOE,
    GEMMA4,
    GEMMA4_INPUTS,
    GEMMA4_MOE,
    GLM_MOE,
    GPT_OSS,
    GREEDY,
    LFM2,
    LONGROPE_PARTIAL,
    MAMBA,
    MINIMAX_M2,
    NEMOTRON,
    NEMOTRON_MOE,
    PageDealer,
    chunk,
    reference_logits,
    run_chunks,
    sampled,
    save_tiny_model,
    tiny_runner,
)
from tests.support.vision_models import (
    Family,
    expected_logits,
    prompt_with_images,
    random_image,
    save_vision_model,
)

LAYER_TYPES = {"gemma3": ["sliding_attention", "full_attention"]}
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="runs under TRITON_INTERPRET=1 without a GPU only")
TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(40)]


CHANGES: dict[str, dict[str, Any]] = {
    "phi3": LONGROPE_PARTIAL,
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK_V3,
    "gpt_oss": GPT_OSS,
    "gemma4_text": GEMMA4 | {"num_hidden_layers": 2, "layer_types": None},
    "gemma4_text:moe": GEMMA4_MOE | {"num_hidden_layers": 2, "layer_types": None},
    "glm4": {"head_dim": 16},
    "glm4_moe": GLM_MOE,
    "minimax_m2": MINIMAX_M2,
    "gemma2": {"head_dim": 16, "sliding_window": 9, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0},
}


GREEDY_TOKENS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def prompt(slot: int, start: int, count: int, pages: list[int]) -> Row:
    return chunk(slot, TOKENS, start, count, pages, sampling=GREEDY)


@pytest.fixture
def interpreted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModelRunner]:
    """Makes runners whose graphs are functions: of prompts of 48 tokens, beside decode rows or not, and two decodes."""
    # A CPU's layers would give their weights up for copies in another order.
    monkeypatch.setattr(linear, "blocked_weight", lambda weight: None)
    for module in (cuda_graphs, cuda_sampling):
        monkeypatch.setattr(module, "record", lambda run, memory: (run(), SimpleNamespace(replay=run))[1])
    monkeypatch.setattr(captured_graphs, "prefill_buckets", lambda largest, **_: [48])
    monkeypatch.setattr(cuda_executor, "decode_buckets", lambda largest: [4])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)

    def make(
        *, decodes_beside: int = 0, group: RankGroup = ALONE_IN_GROUP, defers: bool = False, **settings: Any
    ) -> ModelRunner:
        monkeypatch.setattr(captured_graphs, "decodes_beside", lambda *_, **__: decodes_beside)
        common = {"device": "cpu", "page_size": 16, "kv_cache_memory": 1 << 23, "max_num_seqs": 6}
        return make_runner(make_settings(tmp_path, **(common | settings)), group, defers=defers)

    return make


def sampled_by(runner: ModelRunner, *rows: Row, num_decodes: int = 0) -> list[int | None]:
    """Launch a pass whose decode rows go on with TOKENS, whatever was sampled before."""
    assert isinstance(runner.executor, CudaExecutor)
    state = runner.executor.state.state
    for row in rows[:num_decodes]:
        state.last_tokens[row.slot] = TOKENS[row.start]
        assert state.kv_lengths[row.slot] == row.start
        assert state.positions[row.slot] == row.position
    return sampled(runner.collect(runner.launch(Batch(list(rows), num_decodes))))


@pytest.mark.parametrize(
    ("architecture", "decodes_beside"),
    [
        ("qwen2", 0),
        ("qwen2", 4),
        ("qwen3", 0),
        ("qwen3", 4),
        ("phi3", 4),
        ("gemma2", 4),
        ("olmo2", 4),
        ("deepseek_v2", 0),
        ("deepseek_v2", 4),
        ("deepseek_v3", 4),
        ("gpt_oss", 0),
        ("gpt_oss", 4),
        ("gemma4_text", 0),
        ("gemma4_text", 4),
        ("gemma4_text:moe", 4),
        ("glm4", 4),
        ("glm4_moe", 4),
        ("minimax_m2", 4),
    ],
)
def test_passes_equal_transformers(
    tmp_path: Path, interpreted: Callable[..., ModelRunner], architecture: str, decodes_beside: int
) -> None:
    changes = {"num_hidden_layers": 2} | CHANGES.get(architecture, {})
    model = save_tiny_model(tmp_path, architecture.partition(":")[0], **changes)
    runner = interpreted(decodes_beside=decodes_beside)
    assert isinstance(runner.executor, CudaExecutor)
    expected = reference_logits(model, TOKENS)
    best = expected.argmax(-1).tolist()
    dealer = PageDealer(runner)
    actual = run_chunks(runner, TOKENS, dealer.table(40), [13, 1, 1, 25])
    assert (actual - expected).abs().max() <= 3e-4

    run = partial(sampled_by, runner)
    pages, others, third, fourth = (dealer.table(48) for _ in range(4))
    assert run(prompt(3, 0, 20, pages), prompt(5, 0, 7, others)) == [best[19], best[6]]
    assert run(prompt(3, 20, 10, pages)) == [best[29]]
    assert run(Row(3, 30, 1, None, pages, GREEDY, output_index=1), num_decodes=1) == [best[30]]
    mixed = [Row(3, 31, 1, None, pages, GREEDY, output_index=2), prompt(5, 7, 5, others)]
    assert run(*mixed, num_decodes=1) == [best[31], best[11]]
    decodes = [Row(3, 32, 1, None, pages, GREEDY, output_index=3), Row(5, 12, 1, None, others, GREEDY, output_index=1)]
    prompts = [prompt(1, 0, 18, third), chunk(2, TOKENS, 0, 9, fourth)]
    assert run(*decodes, *prompts, num_decodes=2) == [best[32], best[12], best[17], None]
    beside = [Row(5, 13, 1, None, others, GREEDY, output_index=2), prompt(1, 18, 20, third)]
    assert run(*beside, num_decodes=1) == [best[13], best[37]]


@pytest.mark.parametrize(("family", "decodes_beside"), [("qwen2_5_vl", 0), ("qwen3_vl", 4), ("gemma3", 4)])
def test_logits_equal_transformers_when_prompts_have_images(
    tmp_path: Path, interpreted: Callable[..., ModelRunner], family: Family, decodes_beside: int
) -> None:
    """Chunks with images run kernel by kernel; the text after them and the decode rows are replayed."""
    model = save_vision_model(tmp_path, family, num_hidden_layers=2, layer_types=LAYER_TYPES.get(family))
    runner = interpreted(decodes_beside=decodes_beside)
    parts = (4, random_image(family, 1, (4, 4)), 3, random_image(family, 2, (4, 8)), 20)
    token_ids, inputs = prompt_with_images(family, parts)
    expected = expected_logits(model, family, token_ids, inputs)
    assert runner.config.vision is not None
    images, encoder_cache = PromptImages.of(inputs, runner.config.vision), EncoderCacheManager(100, 100)
    pages, best = PageDealer(runner).table(80), expected.argmax(-1).tolist()

    def chunk_of(start: int, end: int, **fields: Any) -> Batch:
        batch, row = Batch([], 0), chunk(3, token_ids, start, end - start, pages, **fields)
        encoder_cache.take(batch, row, images)
        batch.rows.append(row)
        return batch

    cut, length = images.rows[0].end + 2, len(token_ids)
    whole = torch.cat([runner.logits(chunk_of(0, cut)), runner.logits(chunk_of(cut, length))])
    assert (whole - expected).abs().max() <= 3e-4
    for start, end in ((0, cut), (cut, length - 4), (length - 4, length - 3)):
        assert sampled(runner.collect(runner.launch(chunk_of(start, end, sampling=GREEDY)))) == [best[end - 1]]
    for index in range(3):
        row = Row(3, length - 3 + index, 1, None, pages, GREEDY, output_index=index + 1)
        row.position_offset = images.position_offset
        assert sampled_by_tokens(runner, row, token_ids) == [best[length - 3 + index]]


def sampled_by_tokens(runner: ModelRunner, row: Row, token_ids: list[int]) -> list[int | None]:
    """Launches a decode row that goes on with its token of `token_ids`, whatever was sampled before."""
    assert isinstance(runner.executor, CudaExecutor)
    state = runner.executor.state.state
    state.last_tokens[row.slot] = token_ids[row.start]
    assert state.positions[row.slot] == row.position
    return sampled(runner.collect(runner.launch(Batch([row], 1))))


@pytest.mark.parametrize(
    "settings", [{}, {"decodes_beside": 4}, {"enforce_eager": True}], ids=["apart", "beside", "eager"]
)
def test_decodes_select_the_pages_that_plain_torch_selects(
    tmp_path: Path, interpreted: Callable[..., ModelRunner], settings: dict[str, Any]
) -> None:
    """One sequence is beyond the budget and completes a page; the other begins and stays within it."""
    save_tiny_model(tmp_path, "qwen3", num_hidden_layers=3)
    selection = {"kv_selection": "quest", "kv_selection_budget": 64, "page_size": 16}
    tokens = [(position * 53 + 7) % 190 + 5 for position in range(100)]

    def run(runner: ModelRunner) -> list[list[int | None]]:
        executor, dealer, made = runner.executor, PageDealer(runner), []
        pages, others = dealer.table(112), dealer.table(32)

        def launch(*rows: Row, num_decodes: int = 0) -> None:
            for row in rows[:num_decodes]:
                state = executor.state.state if isinstance(executor, CudaExecutor) else executor
                state.last_tokens[row.slot] = tokens[row.start]  # type: ignore[attr-defined]  # of both executors
            made.append(sampled(runner.collect(runner.launch(Batch(list(rows), num_decodes)))))

        def decode(slot: int, start: int, table: list[int], index: int) -> Row:
            return Row(slot, start, 1, None, table, GREEDY, output_index=index)

        for start, count in ((0, 40), (40, 40), (80, 13)):
            launch(chunk(3, tokens, start, count, pages, sampling=GREEDY if start == 80 else None))
        launch(decode(3, 93, pages, 1), chunk(1, tokens, 0, 17, others, sampling=GREEDY), num_decodes=1)
        for step in range(1, 5):
            launch(decode(3, 93 + step, pages, 1 + step), decode(1, 16 + step, others, step), num_decodes=2)
        launch(chunk(3, tokens, 98, 1, pages, sampling=GREEDY, output_index=6))  # exact, although one token
        return made

    expected = run(tiny_runner(tmp_path, **selection))
    assert run(interpreted(**settings, **selection)) == expected
    assert run(tiny_runner(tmp_path)) != expected, "nothing was selected"


RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("qwen3_next", GATED_DELTA | GATED_MOE | {"full_attention_interval": 2, "num_hidden_layers": 2}),
    "granite-hybrid": ("granitemoehybrid", MAMBA | {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "nemotron-h": ("nemotron_h", NEMOTRON | {"head_dim": 16}),
    "nemotron-3": ("nemotron_h", NEMOTRON_MOE | {"head_dim": 16, "moe_latent_size": 20}),
    "lfm2": ("lfm2", LFM2),
}


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("deepseek_v32", DEEPSEEK_V32), ("gemma4_text", GEMMA4_INPUTS)],
    ids=["sparse attention", "inputs of layers"],
)
def test_passes_without_graphs_equal_transformers(
    tmp_path: Path, interpreted: Callable[..., ModelRunner], architecture: str, changes: dict[str, Any]
) -> None:
    """Of models that need `enforce_eager`."""
    model = save_tiny_model(tmp_path, architecture, **changes)
    runner = interpreted(enforce_eager=True)
    expected = reference_logits(model, TOKENS)
    dealer = PageDealer(runner)
    actual = run_chunks(runner, TOKENS, dealer.table(40), [13, 1, 1, 25])
    assert (actual - expected).abs().max() <= 3e-4
    best, pages, run = expected.argmax(-1).tolist(), dealer.table(48), partial(sampled_by, runner)
    assert run(prompt(3, 0, 20, pages)) == [best[19]]
    assert run(prompt(3, 20, 10, pages)) == [best[29]]
    assert run(Row(3, 30, 1, None, pages, GREEDY, output_index=1), num_decodes=1) == [best[30]]


@pytest.mark.parametrize(
    ("kind", "eager"), [*((kind, False) for kind in RECURRENT), ("qwen3-next", True)], ids=lambda value: str(value)
)
def test_passes_over_recurrent_state_equal_transformers(
    tmp_path: Path, interpreted: Callable[..., ModelRunner], kind: str, *, eager: bool
) -> None:
    """All passes are replayed, those among them that resume from a checkpoint or write one."""
    architecture, changes = RECURRENT[kind]
    model = save_tiny_model(tmp_path, architecture, **changes)
    runner = interpreted(enforce_eager=eager, decodes_beside=4 if kind == "granite-hybrid" else 0)
    assert isinstance(runner.executor, CudaExecutor)
    expected = reference_logits(model, TOKENS)
    best = expected.argmax(-1).tolist()
    dealer = PageDealer(runner)
    pages, others = dealer.table(48), dealer.table(48)
    first = chunk(0, TOKENS, 0, 33, pages, checkpoints=[(16, 1), (32, 0)])
    assert (runner.logits(Batch([first], 0)) - expected[:33]).abs().max() <= 3e-4
    resumed = chunk(1, TOKENS, 16, 20, pages, state_source=1)
    assert (runner.logits(Batch([resumed], 0)) - expected[16:36]).abs().max() <= 3e-4

    run = partial(sampled_by, runner)
    first = chunk(3, TOKENS, 0, 20, pages, sampling=GREEDY, checkpoints=[(7, 3), (16, 4)])
    assert run(first, prompt(5, 0, 7, others)) == [best[19], best[6]]
    resumed = chunk(1, TOKENS, 16, 9, pages, state_source=4, sampling=GREEDY)
    assert run(resumed) == [best[24]]
    decode = Row(3, 20, 1, None, pages, GREEDY, output_index=1)
    assert run(decode, prompt(5, 7, 5, others), num_decodes=1) == [best[20], best[11]]
    decodes = [
        Row(3, 21, 1, None, pages, GREEDY, output_index=2, checkpoints=[(1, 2)]),
        Row(5, 12, 1, None, others, GREEDY, output_index=1),
    ]
    assert run(*decodes, num_decodes=2) == [best[21], best[12]]
    resumed = chunk(1, TOKENS, 22, 1, pages, state_source=2, sampling=GREEDY)
    begun = chunk(2, TOKENS, 0, 1, dealer.table(48), sampling=GREEDY)
    decode = Row(5, 13, 1, None, others, GREEDY, output_index=2)
    assert run(decode, resumed, begun, num_decodes=1) == [best[13], best[22], best[0]]
    go_on = [Row(slot, start, 1, None, [], GREEDY, output_index=1) for slot, start in ((1, 23), (2, 1))]
    go_on[0].page_table, go_on[1].page_table = pages, begun.page_table
    assert run(*go_on, num_decodes=2) == [best[23], best[1]]


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("qwen3", {}),
        ("qwen3", {"decodes_beside": 4}),
        ("qwen3", {"enforce_eager": True}),
        ("qwen3", {"kv_cache_dtype": "int8", "decodes_beside": 4}),
        ("gemma2", {}),
        ("deepseek_v2", {}),
        ("deepseek_v2", {"decodes_beside": 4}),
    ],
)
def test_tokens_behind_a_gap_are_rotated_by_position_and_cached_by_index(
    tmp_path: Path, interpreted: Callable[..., ModelRunner], architecture: str, settings: dict[str, Any]
) -> None:
    """One sequence's last tokens stand further on in the text than in the cache, beside another that is whole."""
    layers = 1 if architecture == "qwen3" else 2  # with and without a window, of all latents or of the last tokens
    model = save_tiny_model(tmp_path, architecture, num_hidden_layers=layers, **CHANGES.get(architecture, {}))
    runner = interpreted(**settings)
    gap, positions = 37, [*range(20), *range(57, 77)]
    expected = reference_logits(model, TOKENS, positions)
    best, best_of_whole = expected.argmax(-1).tolist(), reference_logits(model, TOKENS).argmax(-1).tolist()
    assert best[20:] != best_of_whole[20:], "the gap changes nothing"
    dealer = PageDealer(runner)
    pages, others = dealer.table(48), dealer.table(48)
    if settings.get("enforce_eager"):
        actual = run_chunks(runner, TOKENS, dealer.table(40), [13, 7, 1, 19], positions)
        assert (actual - expected).abs().max() <= 3e-4

    run = partial(sampled_by, runner)

    def behind(start: int, index: int, count: int | None = None) -> Row:
        tokens = None if count is None else TOKENS[start : start + count]
        return Row(3, start, count or 1, tokens, pages, GREEDY, output_index=index, position_offset=gap)

    assert run(prompt(3, 0, 20, pages), prompt(5, 0, 7, others)) == [best[19], best_of_whole[6]]
    for start in (20, 23, 26):
        assert run(behind(start, 0, 3)) == [best[start + 2]]
    assert run(behind(29, 1), Row(5, 7, 1, None, others, GREEDY, output_index=1), num_decodes=2) == [
        best[29],
        best_of_whole[7],
    ]
    assert run(behind(30, 2), prompt(5, 8, 5, others), num_decodes=1) == [best[30], best_of_whole[12]]
    assert run(behind(31, 3), num_decodes=1) == [best[31]]
    beside = Row(5, 13, 1, None, others, GREEDY, output_index=1)
    assert run(beside, behind(32, 4, 1), num_decodes=1) == [best_of_whole[13], best[32]]


def _logits_of_ranks(make: Callable[[ThreadRank], ModelRunner]) -> list[torch.Tensor]:
    """Of two, one after the other: the interpreter runs one kernel at a time."""
    table = TableInTurns(2)

    def logits_of(number: int) -> torch.Tensor:
        with table.turn:
            runner = make(ThreadRank(number, table, table))
            return run_chunks(runner, TOKENS, PageDealer(runner).table(40), [13, 1, 1, 25])

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(logits_of, range(2)))


@pytest.mark.parametrize(
    ("architecture", "whole"), [("deepseek_v2", False), ("deepseek_v3", False), ("deepseek_v3", True)]
)
def test_ranks_with_latents_and_shared_experts_equal_transformers(
    tmp_path: Path, interpreted: Callable[..., ModelRunner], architecture: str, whole: bool
) -> None:
    model = save_tiny_model(tmp_path, architecture, num_hidden_layers=2, **CHANGES[architecture])
    made = partial(interpreted, tensor_parallel_size=2, enable_expert_parallel=whole)
    found = _logits_of_ranks(lambda rank: made(group=rank))
    assert torch.equal(*found)
    assert (found[0] - reference_logits(model, TOKENS)).abs().max() <= 3e-4


def quantize_to_both(folder: Path, form: str) -> dict[str, torch.Tensor]:
    """Layers of several schemes in one model."""
    attention = Group("w4a16", ("re:.*self_attn.*",), tuple(f"self_attn.{part}_proj" for part in "qkvo"))
    return quantize_mixed(folder, [attention, Group(form, ("Linear",), ("_proj",))])


@pytest.mark.parametrize(
    ("form", "make"),
    [("nvfp4", quantize_to_fp4), ("gptq-act-order", quantize_to_integers), ("mxfp4", quantize_to_both)],
)
def test_weights_in_small_groups_stay_packed(
    tmp_path: Path,
    interpreted: Callable[..., ModelRunner],
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    make: Callable[[Path, str], dict[str, torch.Tensor]],
) -> None:
    """As on a GPU, with passes of few rows and of more."""
    model = save_tiny_model(tmp_path, "qwen2", num_hidden_layers=1)
    model.load_state_dict(make(tmp_path, form), strict=False)
    for module in (fp4, integer):
        monkeypatch.setattr(module, "multiplies_groups", lambda *_: True)
    monkeypatch.setattr(fp4, "multiplies_fp8", lambda _: True)
    monkeypatch.setattr(grouped_weight_gemm, "_REGISTER_M", 20)
    runner = interpreted()
    layer = runner.worker.model.layers[0].mlp.down_proj
    assert isinstance(layer.method, GroupedMethod)
    assert sum(p.numel() * p.itemsize for p in layer.parameters()) <= 0.75 * layer.in_features * layer.out_features
    actual = run_chunks(runner, TOKENS, PageDealer(runner).table(40), [13, 1, 26])
    assert (actual - reference_logits(model, TOKENS)).abs().max() <= 1e-3


def test_passes_equal_transformers_when_gguf_blocks_stay_packed(
    tmp_path: Path, interpreted: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode graphs read embeddings of packed rows, and a tied head the same memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    named = {"attn_v": Encoding.Q8_0, "ffn_down": Encoding.Q4_1}
    encodings = {f"blk.0.{name}.weight": kind for name, kind in named.items()}
    shape = {"num_hidden_layers": 1, "tie_word_embeddings": True}
    (tmp_path / "file").mkdir()
    model = write_gguf(tmp_path / "file" / "m.gguf", "llama", encoding=Encoding.Q4_0, encodings=encodings, **shape)
    shutil.copytree(model_folder(tmp_path / "file" / "m.gguf"), tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(grouped_weight_gemm, "_REGISTER_M", 20)
    runner = interpreted(decodes_beside=4, gguf_blocks="packed")
    ours = runner.worker.model
    assert all(isinstance(layer.self_attn.qkv_proj.method, GroupedMethod) for layer in ours.layers)
    assert isinstance(ours.head.method, GroupedMethod)
    expected = reference_logits(model, TOKENS)
    best = expected.argmax(-1).tolist()
    dealer = PageDealer(runner)
    run, pages, others = partial(sampled_by, runner), dealer.table(48), dealer.table(48)
    assert run(prompt(3, 0, 20, pages), prompt(5, 0, 7, others)) == [best[19], best[6]]
    decodes = [Row(3, 20, 1, None, pages, GREEDY, output_index=1), Row(5, 7, 1, None, others, GREEDY, output_index=1)]
    assert run(*decodes, num_decodes=2) == [best[20], best[7]]


@pytest.mark.parametrize("form", ["awq", "gptq-act-order", "w4a16-asymmetric", "w8a16-packed"])
def test_ranks_keep_their_part_of_integers_packed(
    tmp_path: Path, interpreted: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """As on a GPU; also with act-order, where a rank's columns make groups of several sizes."""
    model = save_tiny_model(tmp_path, "llama", num_hidden_layers=1, intermediate_size=128, head_dim=32)
    model.load_state_dict(quantize_to_integers(tmp_path, form), strict=False)
    monkeypatch.setattr(integer, "multiplies_groups", lambda *_: True)
    runners: list[ModelRunner] = []

    def make(rank: ThreadRank) -> ModelRunner:
        runners.append(interpreted(group=rank, tensor_parallel_size=2))
        return runners[-1]

    found = _logits_of_ranks(make)
    assert torch.equal(*found)
    assert (found[0] - reference_logits(model, TOKENS)).abs().max() <= 1e-3
    for runner in runners:
        layer = runner.worker.model.layers[0]
        parts = layer.self_attn.o_proj, layer.mlp.down_proj
        assert all(isinstance(part.method, GroupedMethod | PackedMethod) for part in parts)


@pytest.mark.parametrize(
    ("architecture", "form"),
    [
        ("qwen2", ""),
        ("gemma2", ""),
        ("qwen3_moe", ""),
        ("deepseek_v2", ""),
        ("llama", "w4a16-asymmetric"),
    ],
)
def test_sums_that_are_pending_between_verbs_equal_transformers(
    tmp_path: Path,
    interpreted: Callable[..., ModelRunner],
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    form: str,
) -> None:
    """Those of many rows, which begin in one verb and are added by halves in the next."""
    changes = {"intermediate_size": 128, "head_dim": 32} if form else CHANGES.get(architecture, {})
    model = save_tiny_model(tmp_path, architecture, num_hidden_layers=2, **changes)
    if form:
        model.load_state_dict(quantize_to_integers(tmp_path, form), strict=False)
        monkeypatch.setattr(integer, "multiplies_groups", lambda *_: True)
    monkeypatch.setattr(overlapped_sum, "_TILE_ROWS", 4)
    peers: list[CopyingPeers] = []

    def make(rank: ThreadRank) -> ModelRunner:
        peers.append(CopyingPeers(rank.parallel.rank, rank.table, 12))
        rank.peers = peers[-1]  # type: ignore[assignment]  # what is used of them
        return interpreted(group=rank, tensor_parallel_size=2)

    found = _logits_of_ranks(make)
    assert torch.equal(*found)
    assert (found[0] - reference_logits(model, TOKENS)).abs().max() <= (1e-3 if form else 3e-4)
    # Output norms come between a product and the sum, and experts have no product that could be cut.
    sums = {"gemma2": 0, "qwen3_moe": 2, "deepseek_v2": 3}.get(architecture, 4)
    for one in peers:
        assert one.events[-8 * sums :] == ["send 0", "send 1", "add 0", "add 1"] * (2 * sums)


def test_quantized_pages_are_read_and_written_as_by_torch(
    tmp_path: Path, interpreted: Callable[..., ModelRunner]
) -> None:
    """Prompt chunks, copied pages and a decode row over pages of integers, beside plain torch over the same."""
    save_tiny_model(tmp_path, "gemma2", num_hidden_layers=2, **CHANGES["gemma2"])
    kept = {"kv_cache_dtype": "int8", "enforce_eager": True}
    ours, plain = interpreted(**kept), interpreted(**kept, attention_backend="torch")
    assert isinstance(ours.executor, CudaExecutor)
    assert not isinstance(plain.executor, CudaExecutor)
    logits = [run_chunks(runner, TOKENS, [5, 2, 7], [13, 1, 25]) for runner in (ours, plain)]
    assert (logits[0] - logits[1]).abs().mean() <= 1e-3
    forks = Transfers(copies=[PageCopy(2, 9, 11), PageCopy(2, 3, 4)])
    for runner in (ours, plain):
        runner.collect(runner.launch(Batch([prompt(1, 0, 27, [5, 2])], 0)))
        runner.collect(runner.launch(Batch([prompt(2, 27, 3, [5, 9])], 0, transfers=forks)))
    reported = [run_chunks(runner, TOKENS, [5, 9], [30]) for runner in (ours, plain)]
    assert (reported[0] - reported[1]).abs().mean() <= 1e-3


@pytest.fixture
def widening(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on Hopper, with the kernel of other GPUs over widened pages; addresses of these, call by call."""
    addresses: list[int] = []

    def attend(q: Any, pool: Any, rows: Any, *, scale: float, config: Any, sinks: Any, out: Any) -> None:
        addresses.append(pool.data_ptr())
        tiles = PrefillConfig(64, 16, 4, 2, programs=1)
        prefill_attention(q, pool, rows, scale=scale, config=tiles, workspace=Workspace(q.device), sinks=sinks, out=out)

    kernel = SimpleNamespace(hopper_prefill_attention=attend)
    monkeypatch.setitem(sys.modules, "mini_infer_engine.kernels.attention.hopper_prefill_attention", kernel)
    monkeypatch.setattr(KernelPolicy, "hopper_fa3", property(lambda policy: True))
    monkeypatch.setattr(attention_config, "supports_hopper_fa3", lambda shape: shape.pages_dtype == torch.float32)
    monkeypatch.setattr(attention_config, "hopper_fa3_is_faster", lambda tokens, sequences, q_heads: tokens > 8)
    monkeypatch.setattr(attention_config, "widening_pays", lambda shape: True)
    return addresses


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_prompts_over_widened_pages_are_as_by_torch(
    tmp_path: Path, interpreted: Callable[..., ModelRunner], widening: list[int], enforce_eager: bool
) -> None:
    """In graphs, whose addresses stay, and kernel by kernel; chunks end inside pages; decode rows stand beside."""
    save_tiny_model(tmp_path, "qwen3", num_hidden_layers=2)
    kept = {"kv_cache_dtype": "int8", "max_model_len": 64, "enforce_eager": enforce_eager, "decodes_beside": 4}
    ours, plain = interpreted(**kept), interpreted(**kept, attention_backend="torch")
    assert isinstance(ours.executor, CudaExecutor)
    workspace = ours.executor.kernels.workspace
    scratch = workspace.wide_pages.data_ptr()
    made = []
    for runner in (ours, plain):
        logits = []
        for rows in (
            [prompt(0, 0, 13, [5, 2])],
            [prompt(0, 13, 12, [5, 2]), prompt(1, 0, 18, [7, 3])],
            [Row(0, 25, 1, TOKENS[25:26], [5, 2], GREEDY, output_index=1), prompt(1, 18, 15, [7, 3, 6])],
        ):
            del widening[:]
            logits.append(runner.collect(runner.launch(Batch(rows, 0))).tokens)
            assert bool(widening) == (runner is ours)
            assert set(widening) <= {scratch}
        made.append(logits)
    assert made[0] == made[1]
    assert workspace.wide_pages.data_ptr() == scratch


def test_passes_whose_pages_do_not_fit_run_kernel_by_kernel_and_are_not_widened(
    tmp_path: Path, interpreted: Callable[..., ModelRunner], widening: list[int]
) -> None:
    save_tiny_model(tmp_path, "qwen3", num_hidden_layers=2)  # of the last, single tokens attend
    runner = interpreted(kv_cache_dtype="int8", max_model_len=64)
    executor = runner.executor
    assert isinstance(executor, CudaExecutor)
    (graph,) = executor.graphs.prefill_graphs.values()
    fits = [prompt(slot, 24, 8, [2 * slot, 2 * slot + 1]) for slot in range(4)]  # 8 pages: two sequences of 64 tokens
    assert graph.fits(32, 0, fits)
    too_many = [*fits[:3], prompt(3, 32, 8, [6, 7, 8])]
    assert not graph.fits(32, 0, too_many)
    del widening[:]
    runner.collect(runner.launch(Batch(too_many, 0)))
    assert not widening
    runner.collect(runner.launch(Batch(fits, 0)))
    assert widening
    few = interpreted(kv_cache_dtype="int8", max_model_len=64, disable=["wide_pages"])
    assert isinstance(few.executor, CudaExecutor)
    (graph,) = few.executor.graphs.prefill_graphs.values()
    assert graph.fits(32, 0, too_many), "what widens nothing has room for any pages"


def test_scratch_memory_for_widened_pages_is_in_the_memory_plan(
    tmp_path: Path, interpreted: Callable[..., ModelRunner], widening: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is taken while what an executor keeps is measured, before pages are counted out."""

    class Eager(CudaExecutor):
        def compile_kernels(self, most_tokens: int, *, defers: bool = False) -> None:
            """The interpreter compiles none."""

    def allocated(device: object) -> int:
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in gc.get_objects()
            if isinstance(tensor, torch.Tensor)
        }
        return sum(storages.values())

    for name, function in {
        "memory_allocated": allocated,
        "max_memory_allocated": allocated,
        "reset_peak_memory_stats": lambda device: None,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    save_tiny_model(tmp_path, "qwen3", num_hidden_layers=1)
    states = {}
    for disabled in ((), ("wide_pages",)):
        settings = {"kv_cache_dtype": "int8", "max_model_len": 64, "max_num_seqs": 4, "disable": list(disabled)}
        runner = interpreted(**settings, enforce_eager=True)
        needs = memory_plan._measure(runner.worker, Eager, runner.executor.settings, 16, runner.kv_cache)
        states[disabled] = needs.state
        spec = runner.worker.kv_spec(16)
    wide_page = 2 * 16 * spec.row_width * spec.dtype.itemsize
    assert states[()] - states["wide_pages",] == pytest.approx(2 * 64 // 16 * wide_page, rel=0.01)


def test_graphs_are_measured_over_slots_that_do_not_move(
    tmp_path: Path, interpreted: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest pass leaves a slot at the longest sequence's end, behind which rotary tables end, too."""
    save_tiny_model(tmp_path, "qwen3", num_hidden_layers=2)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    runner = interpreted(max_model_len=64, max_num_seqs=4)
    executor = runner.executor
    assert isinstance(executor, CudaExecutor)
    executor.launch(memory_plan._largest_pass(executor.settings, 64, 68, 4)).result()
    positions = executor.state.state.positions.tolist()
    assert max(positions) == 64
    executor.graph_bytes()
    assert executor.state.state.positions.tolist() == positions


def test_passes_use_larger_graphs_until_their_own_is_captured(
    tmp_path: Path, interpreted: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph that a pass lacked comes first, and no part of the warm-up changes what running sequences have."""
    monkeypatch.setattr(cuda_executor, "decode_buckets", lambda largest: [1, 2, 3, 6])
    save_tiny_model(tmp_path, "qwen3", num_hidden_layers=2)
    requests = [
        Request(request_id=f"{name}", prompt_token_ids=TOKENS[name : name + 20], sampling=GREEDY_TOKENS)
        for name in range(2)
    ]
    plain = interpreted(attention_backend="torch", kv_cache_memory=1 << 22)
    expected = texts(Engine(plain.settings, plain, (), plain.max_model_len, "", record_events=False), requests)
    runner = interpreted(defers=True)
    executor = runner.executor
    assert isinstance(executor, CudaExecutor)
    graphs = executor.graphs.decode_graphs
    assert list(graphs) == [6, 1], "largest first, so that others share its memory"
    engine = Engine(runner.settings, runner, (), runner.max_model_len, "", record_events=False)
    step = engine.step

    def step_and_warm_up() -> list[Any]:
        outputs = step()
        runner.warm_up()
        return outputs

    monkeypatch.setattr(engine, "step", step_and_warm_up)
    assert texts(engine, requests) == expected
    assert list(graphs) == [6, 1, 2], "the size of this batch, not the others, before rare kernels"
    while runner.warm_up():
        pass
    assert sorted(graphs) == [1, 2, 3, 6]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_rows_with_penalties_biases_and_logprobs_choose_as_torch(
    tmp_path: Path, interpreted: Callable[..., ModelRunner], enforce_eager: bool
) -> None:
    """Penalties, biases, bans and log probabilities: prompt in two chunks, then decodes, beside a plain row."""
    save_tiny_model(tmp_path, "qwen3", num_hidden_layers=2)
    runner, plain = interpreted(enforce_eager=enforce_eager), interpreted(attention_backend="torch")
    params = [
        SamplingParams(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.5, bad_words_token_ids=[[13]]),
        SamplingParams(temperature=0.0, logit_bias={7: 2.0, 9: -5.0}, logprobs=3, frequency_penalty=0.3),
        SamplingParams(temperature=0.0, allowed_token_ids=[4, 50, 51, 120, 121, 122], logprobs=0),
    ]

    def made_by(one: ModelRunner, sampling: SamplingParams) -> list[Any]:
        """Of both slots, pass by pass."""
        dealer, made = PageDealer(one), []
        mine, other, third = (dealer.table(48) for _ in range(3))
        first = chunk(0, TOKENS, 0, 16, mine, prompt_targets=TOKENS[1:17], num_prompt_logprobs=2)
        last = Row(0, 16, 8, TOKENS[16:24], mine, sampling, known_token_ids=TOKENS[:24])
        passes = [Batch([first], 0), Batch([prompt(1, 0, 9, other), last], 0)]
        for index in range(12):
            banned = [(None, 13), (made_before(made), 14)] if index else []
            rows = [Row(0, 24 + index, 1, None, mine, sampling, output_index=index + 1, banned=banned)]
            rows.append(Row(1, 9 + index, 1, None, other, GREEDY, output_index=index + 1))
            if index == 5:
                rows.append(prompt(2, 0, 7, third))
            passes.append(Batch(rows, 2))
            while len(made) < len(passes):
                made.append(one.collect(one.launch(passes[len(made)])))
        return made

    def made_before(made: list[Any]) -> int:
        return int(made[-1].tokens[0][0])

    for sampling in params:
        for ours, theirs in zip(made_by(runner, sampling), made_by(plain, sampling), strict=True):
            assert ours.tokens == theirs.tokens
            for mine, other in ((ours.logprobs, theirs.logprobs), (ours.prompt_logprobs, theirs.prompt_logprobs)):
                assert mine.keys() == other.keys()
                for row in mine:
                    for one, two in zip(mine[row], other[row], strict=True):
                        assert (one.token_id, one.rank, one.top_token_ids) == (
                            two.token_id,
                            two.rank,
                            two.top_token_ids,
                        )
                        assert one.logprob == pytest.approx(two.logprob, abs=1e-3)
                        assert one.top_logprobs == pytest.approx(two.top_logprobs, abs=1e-3)


@pytest.mark.parametrize("decodes_beside", [0, 4])
def test_masked_rows_choose_as_in_torch(
    tmp_path: Path, interpreted: Callable[..., ModelRunner], decodes_beside: int
) -> None:
    """In parts of a pass that a graph has, alone and before a part that overwrites their logits; beside plain rows."""
    save_tiny_model(tmp_path, "qwen3", num_hidden_layers=1)
    runner, plain = interpreted(decodes_beside=decodes_beside), interpreted(attention_backend="torch")
    vocab_size = runner.config.vocab_size
    reported = SamplingParams(temperature=0.0, logprobs=2, presence_penalty=0.5)

    def masks(allowed: dict[int, list[int]]) -> TokenMasks:
        return TokenMasks(list(allowed), np.stack([mask_of(tokens, vocab_size) for tokens in allowed.values()]))

    def made_by(one: ModelRunner) -> list[PassResult]:
        pages, others, third = (PageDealer(one).table(48) for _ in range(3))
        last = Row(1, 0, 9, TOKENS[:9], others, reported, known_token_ids=TOKENS[:9])
        passes = [
            (Batch([prompt(0, 0, 12, pages), last], 0, waits_for_masks=True), masks({0: [17, 18, 19], 1: [20, 21]})),
            (Batch(_decodes(1, pages, others, reported), 2, waits_for_masks=True), masks({0: [30, 31]})),
            (
                Batch([*_decodes(2, pages, others, reported), prompt(2, 0, 7, third)], 2, waits_for_masks=True),
                masks({0: [40, 41], 1: [42], 2: [43, 44]}),
            ),
        ]
        made = []
        for batch, allowed in passes:
            handle = one.launch(batch)
            one.sample(handle, allowed)
            made.append(one.collect(handle))
        return [*made, one.collect(one.launch(Batch(_decodes(3, pages, others, reported), 2)))]

    for ours, theirs in zip(made_by(runner), made_by(plain), strict=True):
        assert ours.tokens == theirs.tokens
        assert {row: [one.token_id for one in reported] for row, reported in ours.logprobs.items()} == {
            row: [one.token_id for one in reported] for row, reported in theirs.logprobs.items()
        }
        for row, found_here in ours.logprobs.items():
            assert found_here[0].logprob == pytest.approx(theirs.logprobs[row][0].logprob, abs=1e-3)


@pytest.mark.parametrize(("architecture", "enforce_eager"), [("qwen2", False), ("qwen2", True), ("olmo2", False)])
def test_pipeline_stages_equal_one_gpu(
    tmp_path: Path, interpreted: Callable[..., ModelRunner], architecture: str, enforce_eager: bool
) -> None:
    """Prompts in chunks beside decode rows, in graphs padded to more rows and without; penalties too."""
    save_tiny_model(tmp_path, architecture, num_hidden_layers=2)
    params = [
        SamplingParams(temperature=0.0, max_tokens=4),
        SamplingParams(temperature=0.9, top_p=0.9, max_tokens=4),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, logprobs=1, max_tokens=4),
    ]
    requests = [
        Request(request_id=str(number), prompt_token_ids=TOKENS[number : number + length], sampling=one, noise_seed=4)
        for number, (one, length) in enumerate(zip(params, (30, 9, 5), strict=True))
    ]
    settings = {"max_num_batched_tokens": 24, "enforce_eager": enforce_eager}
    stages = thread_links(2)
    runners = [interpreted(decodes_beside=4, group=StageAlone(link), **settings) for link in stages]
    assert all(isinstance(one.executor, CudaExecutor) for one in runners)
    found = _generated(StagesInTurn(runners), requests, pipeline_parallel_size=2, **settings)
    plain = interpreted(attention_backend="torch", **settings)
    assert found == _generated(plain, requests, **settings)
    states = [one.executor.state.state for one in runners]
    assert torch.equal(states[0].positions, states[1].positions)  # on both stages, padding among them
    assert torch.equal(states[0].kv_lengths, states[1].kv_lengths)


@pytest.mark.parametrize(
    ("architecture", "changes", "settings"),
    [
        ("gemma2", CHANGES["gemma2"], {}),
        ("mistral", {"sliding_window": 9}, {"decodes_beside": 4}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1}, {"enforce_eager": True}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1}, {"decodes_beside": 4}),
    ],
)
def test_text_is_that_of_torch_when_pages_behind_windows_are_freed(
    tmp_path: Path,
    interpreted: Callable[..., ModelRunner],
    architecture: str,
    changes: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Prompts in chunks and from the cache, beside decode rows, in graphs and without."""
    save_tiny_model(tmp_path, architecture, num_hidden_layers=2, **changes)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    requests = [
        Request(request_id=name, prompt_token_ids=TOKENS[:length], sampling=params)
        for name, length in (("a", 40), ("b", 27), ("c", 5))
    ]
    limits = {"max_num_batched_tokens": 24}
    plain = _generated(interpreted(attention_backend="torch", **limits), requests, **limits)
    runner = interpreted(disable_hybrid_kv_cache_manager=False, **settings, **limits)
    assert isinstance(runner.executor, CudaExecutor)
    assert not runner.kv_cache.is_uniform
    engine = Engine(make_settings(Path("unused"), max_num_seqs=6, **limits), runner, (), 512, "revision")
    again = [
        Request(request_id=f"{request.request_id}2", prompt_token_ids=request.prompt_token_ids, sampling=params)
        for request in requests
    ]
    assert texts(engine, requests) == plain
    assert texts(engine, again) == plain
    assert engine.stats().cached_prompt_tokens >= 48
    assert engine.scheduler.kv_cache.usage == 0


def _generated(runner: Any, requests: list[Request], **settings: Any) -> list[list[int]]:
    engine_settings = make_settings(Path("unused"), max_num_seqs=6, **settings)
    return texts(Engine(engine_settings, runner, (), runner.max_model_len, "revision", record_events=False), requests)


def _decodes(index: int, pages: list[int], others: list[int], reported: SamplingParams) -> list[Row]:
    first = Row(0, 11 + index, 1, None, pages, GREEDY, output_index=index)
    return [first, Row(1, 8 + index, 1, None, others, reported, output_index=index)]


@pytest.mark.parametrize("decodes_beside", [0, 4])
def test_forked_beams_named_tokens_and_embeddings_are_those_of_torch(
    tmp_path: Path, interpreted: Callable[..., ModelRunner], decodes_beside: int, poisoned_memory: None
) -> None:
    """Two beams share a page and part in the next one, beside a decode row; then a row requests its hidden state."""
    save_tiny_model(tmp_path, "qwen3", num_hidden_layers=2)
    runner, plain = interpreted(decodes_beside=decodes_beside), interpreted(attention_backend="torch")
    reported = SamplingParams(temperature=0.0, logprobs=8)
    named = SamplingParams(temperature=0.0, logprobs=0, logprob_token_ids=[5, 90, 7])
    parted = [*TOKENS[:20], 17]

    def made_by(one: ModelRunner) -> list[PassResult]:
        dealer = PageDealer(one)
        pages, forks, others, third = (dealer.table(48) for _ in range(4))
        shared = [pages[0], *forks[1:]]
        fork = Transfers(copies=[PageCopy(pages[1], forks[1], 4)])
        beams = [chunk(0, TOKENS, 20, 1, pages, sampling=reported), chunk(1, parted, 20, 1, shared, sampling=named)]
        decode = Row(2, 9, 1, None, others, GREEDY, output_index=1)
        # Then the second beam's text goes on in both slots: the first has lost its pages, which another prompt gets.
        again, fresh = [*parted, 9], dealer.table(48)
        again_shared = [pages[0], fresh[1], *fresh[2:]]
        refork = Transfers(copies=[PageCopy(forks[1], fresh[1], 5)])
        later = Row(2, 10, 1, None, others, GREEDY, output_index=2)
        grown = [
            chunk(1, [*parted, 8], 21, 1, shared, sampling=reported),
            chunk(0, again, 21, 1, again_shared, sampling=reported),
        ]
        passes = [
            Batch([chunk(0, TOKENS, 0, 20, pages, sampling=reported), prompt(2, 0, 9, others)], 0),
            Batch([decode, *beams], 1, transfers=fork),
            Batch([later, grown[0], prompt(4, 0, 13, pages[1:]), grown[1]], 1, transfers=refork),
            Batch([prompt(3, 0, 11, third), chunk(4, TOKENS, 0, 7, dealer.table(16), sampling=GREEDY, embeds=True)], 0),
        ]
        return [one.collect(one.launch(batch)) for batch in passes]

    for ours, theirs in zip(made_by(runner), made_by(plain), strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.logprobs.keys() == theirs.logprobs.keys()
        for row, (position,) in ours.logprobs.items():
            (other,) = theirs.logprobs[row]
            assert position.top_token_ids == other.top_token_ids
            assert position.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-3)
        assert ours.embeddings.keys() == theirs.embeddings.keys()
        for row, embedding in ours.embeddings.items():
            found, expected = (np.frombuffer(one, np.float32) for one in (embedding, theirs.embeddings[row]))
            assert found / np.linalg.norm(found) == pytest.approx(expected / np.linalg.norm(expected), abs=1e-3)


def test_text_is_that_of_torch_when_a_prompt_is_compacted(
    tmp_path: Path, interpreted: Callable[..., ModelRunner]
) -> None:
    """It decodes beside a sequence with a full cache. Other policies are in test_kv_eviction.py, on a GPU."""
    save_tiny_model(tmp_path, "qwen3", num_hidden_layers=2)
    tokens = [(index * 37 + index**2 * 11) % 190 + 5 for index in range(70)]
    params = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
    compacted = SamplingParams(**params, kv_policy="snapkv", kv_budget=66)
    requests = [
        Request(request_id="a", prompt_token_ids=tokens, sampling=compacted),
        Request(request_id="b", prompt_token_ids=tokens[3:9], sampling=SamplingParams(**params)),
    ]
    limits = {"max_num_batched_tokens": 88}
    expected = _generated(interpreted(attention_backend="torch", **limits), requests, **limits)
    runner = interpreted(decodes_beside=4, **limits)
    assert isinstance(runner.executor, CudaExecutor)
    assert _generated(runner, requests, **limits) == expected


class NotedLoad:
    """A load whose layers are all there. It notes for which ones passes wait."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def wait_for_layer(self, layer: int) -> None:
        self.layers.append(layer)


@pytest.mark.parametrize(
    ("architecture", "decodes_beside", "num_groups"), [("qwen3", 0, 1), ("qwen3", 4, 1), ("gemma2", 4, 2)]
)
def test_pass_with_prompts_waits_for_each_layer_of_its_loads(
    tmp_path: Path, interpreted: Callable[..., ModelRunner], architecture: str, decodes_beside: int, num_groups: int
) -> None:
    """A pass waits by a graph of its own, kernel by kernel, or as a whole until that graph is there; one token is a
    prompt, too. A page of two KV groups has one layer.
    """
    save_tiny_model(tmp_path, architecture, num_hidden_layers=2, **CHANGES.get(architecture, {}))
    runner = interpreted(decodes_beside=decodes_beside, disable_hybrid_kv_cache_manager=num_groups == 1)
    assert (len(runner.kv_cache.groups), runner.pool.spec.num_layers) == (num_groups, 2 // num_groups)
    executor, captured = runner.executor, NotedLoad()
    assert isinstance(executor, CudaExecutor)
    executor.capture(loads=captured)
    assert set(executor.graphs.following_graphs) == set(executor.graphs.prefill_graphs) == {48}

    def waited(row: Row) -> tuple[list[int], list[int], list[int | None]]:
        """Returns the layers that the graph waited for, those that were waited for by call, and the token."""
        captured.layers, load = [], NotedLoad()
        made = sampled(runner.collect(runner.launch(Batch([row], 0, layerwise_loads=[load]))))
        return captured.layers, load.layers, made

    pages = [0, 1, 2]
    rows = [prompt(0, 0, 20, pages), prompt(0, 20, 1, pages), prompt(0, 21, 15, pages)]
    for row in rows:
        row.more_page_tables = [[3, 4, 5]] * (num_groups - 1)
    expected = [sampled(runner.collect(runner.launch(Batch([row], 0)))) for row in rows]
    assert captured.layers == [0, 1], "those of the recording: other passes wait for nothing"
    assert [waited(row) for row in rows] == [([0, 1], [], token) for token in expected]
    scored = msgspec.structs.replace(rows[0], prompt_targets=[7])  # kernel by kernel
    assert waited(scored)[:2] == ([], [0, 1])
    executor.graphs.following_graphs = {}
    assert [waited(row) for row in rows] == [([], [0, 1], token) for token in expected]
