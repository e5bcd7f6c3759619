"""Passes on a GPU follow loads from main memory layer by layer, replayed and launched kernel by kernel."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.kv_tiers import load_choice
from mini_infer_engine.core.kv_tiers import tier as tier_module
from mini_infer_engine.core.kv_tiers.tier_memory import PageMove
from mini_infer_engine.core.kv_transfer import LayerProgress
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.runtime import model_runner
from mini_infer_engine.runtime.cuda.executor import CudaExecutor
from mini_infer_engine.runtime.memory.cuda_host_tier import CudaHostTier
from mini_infer_engine.runtime.memory.page_codec import RawPages
from tests.gpu.device import DEVICE, GPU_ONLY
from tests.gpu.runs import make_engine, make_runner, make_settings
from tests.gpu.test_host_tier import SHAPES
from tests.support.tier_copies import flips_found, moved
from tests.support.tiny_models import DEEPSEEK, GPT_OSS, save_tiny_model

pytestmark = GPU_ONLY
NUM_LAYERS, LAYER_WORDS, NUM_PAGES = 20, 512, 12
LATE_CYCLES = 100_000_000
"""Cycles of a GPU by which a load is late: some 60 ms."""


def filled_tier() -> tuple[torch.Tensor, CudaHostTier, list[int]]:
    """Returns pages of a pool, a tier that has them in reverse order, and their digests."""
    pages = torch.randint(-(2**62), 2**62, (NUM_PAGES, NUM_LAYERS * LAYER_WORDS), device=DEVICE)
    tier = CudaHostTier(RawPages([pages]), NUM_PAGES, b"")
    tier.num_layers = NUM_LAYERS
    tier.store(0, [PageMove(page, NUM_PAGES - 1 - page) for page in range(NUM_PAGES)])
    return pages, tier, list(moved(tier).digests)


@pytest.mark.parametrize("sources", [[3], [0, 1, 2, 3], [7, 2, 3, 9, 10, 11]])
def test_pages_and_digests_are_those_of_whole_loads(sources: list[int]) -> None:
    pages, tier, digests = filled_tier()
    before = pages.clone()
    pages.zero_()
    torch.cuda.synchronize()
    targets = list(range(len(sources)))
    load = tier.load_layerwise(7, [PageMove(*pair) for pair in zip(sources, targets, strict=True)])
    for layer in range(NUM_LAYERS):
        load.wait_for_layer(layer)
        words = slice(layer * LAYER_WORDS, (layer + 1) * LAYER_WORDS)
        expected = before[[NUM_PAGES - 1 - source for source in sources], words]
        assert torch.equal(pages[targets, words], expected)
    assert not pages[len(sources) :].any()
    ended = moved(tier)
    assert (ended.ticket, ended.error) == (7, "")
    assert list(ended.digests) == [digests[NUM_PAGES - 1 - source] for source in sources]


def test_every_bit_flip_is_found_when_pages_come_layer_by_layer() -> None:
    _, tier, digests = filled_tier()
    assert flips_found(tier, tier.load_layerwise, digests[::-1], 200, target=5) == 200


# On an engine.

PROMPTS = [[(place * 7 + shift * 13) % 190 + 5 for place in range(250)] for shift in range(4)]
WINDOWED: dict[str, Any] = {"disable_hybrid_kv_cache_manager": False}
GEMMA = SHAPES["gemma3_text"] | {"layer_types": ["sliding_attention", "full_attention"] * 2}
SMALL_GPT_OSS = GPT_OSS | {"num_hidden_layers": 4, "head_dim": 64, "sliding_window": 24, "hidden_size": 128}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "replayed": ("qwen3", {"head_dim": 64}, {"step_depth": 1}),
    "eager": ("qwen3", {"head_dim": 64}, {"step_depth": 0, "enforce_eager": True}),
    "torch": ("qwen3", {"head_dim": 64}, {"attention_backend": "torch"}),
    "int8": ("qwen3", {"head_dim": 64}, {"kv_cache_dtype": "int8", "step_depth": 1}),
    "chunks": ("qwen3", {"head_dim": 64}, {"step_depth": 1, "long_prefill_token_threshold": 16}),
    "ngram": ("qwen3", {"head_dim": 64}, {"speculative_method": "ngram", "num_speculative_tokens": 2}),
    "latents": ("deepseek_v2", DEEPSEEK | {"hidden_size": 128}, {"step_depth": 1}),
    "gemma3": ("gemma3_text", GEMMA, WINDOWED | {"step_depth": 1}),
    "gemma3 eager": ("gemma3_text", GEMMA, WINDOWED | {"enforce_eager": True}),
    "gemma3 int8 chunks": (
        "gemma3_text",
        GEMMA,
        WINDOWED | {"step_depth": 1, "kv_cache_dtype": "int8", "long_prefill_token_threshold": 16},
    ),
    "gpt-oss": ("gpt_oss", SMALL_GPT_OSS, WINDOWED | {"step_depth": 1}),
    "mistral": ("mistral", {"head_dim": 64, "sliding_window": 40}, WINDOWED | {"step_depth": 1}),
}
LOADED_PAGES = {"gemma3": 10 + 3, "gpt-oss": 10 + 2, "mistral": 3}
"""Pages of 160 tokens, by the first word of a case: of a window those that the next token sees. Of other models 10."""


def open_engine(folder: Path, **changes: Any) -> Engine:
    """Returns an engine with main memory below its pool, which loads whatever is there, and with the pass where it can:
    so small a model would be computed sooner.
    """
    common = {"page_size": 16, "max_model_len": 320, "kv_host_memory": 1 << 24}
    settings = make_settings(folder, **common | changes)
    runner = make_runner(settings)
    runner.swap_space = replace(runner.swap_space, compute_s_per_token=1.0)
    engine = make_engine(settings, runner)
    engine._rate.committed = lambda step, now_s: None  # type: ignore[method-assign]  # a rate that stays
    if isinstance(runner.host_memory, CudaHostTier):
        runner.host_memory.least_load_s = 0.0
    return engine


def tokens(engine: Engine, prompt: list[int], beside: Sequence[list[int]] = ()) -> list[int]:
    """The greedy tokens of a prompt, which comes while those `beside` it decode."""
    for number, other in enumerate(beside):
        engine.add(Request(request_id=f"beside {number}", prompt_token_ids=other, sampling=greedy(40)))
    for _ in range(6 if beside else 0):
        engine.step()
    engine.add(Request(request_id="only", prompt_token_ids=prompt, sampling=greedy(5)))
    made = list[int]()
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            made += output.token_ids if output.request_id == "only" else []
    return made


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def evict(engine: Engine) -> None:
    """Has the blocks that are cached in main memory alone, and other bytes on the GPU."""
    while engine.write_behind():
        engine._tiers.wait(1.0)
    while engine._tiers.are_copying:
        engine._tiers.wait(1.0)
        engine._tiers.take(0.0, 0.0)
    engine.scheduler.kv_cache.reset_prefix_cache()
    engine._runner.pool.storage.fill_(1)  # type: ignore[attr-defined]  # it has a pool
    torch.cuda.synchronize()


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the pages of each load that goes with a pass, and has them come late, so that who reads too early reads what
    `evict` has left there.
    """
    pages, load = list[int](), CudaHostTier.load_layerwise

    def load_late(tier: CudaHostTier, ticket: int, moves: Any) -> Any:
        pages.append(len(moves))
        with torch.cuda.stream(tier._loading):
            torch.cuda._sleep(LATE_CYCLES)  # type: ignore[no-untyped-call]  # torch's
        return load(tier, ticket, moves)

    monkeypatch.setattr(CudaHostTier, "load_layerwise", load_late)
    return pages


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_behind", [1, 10, 90])
def test_tokens_are_the_same_when_passes_follow_loads(
    tmp_path: Path, followed: list[int], case: str, num_behind: int
) -> None:
    architecture, model, settings = CASES[case]
    save_tiny_model(tmp_path, architecture, **model)
    plain, engine = open_engine(tmp_path, kv_host_memory=0, **settings), open_engine(tmp_path, **settings)
    for prompt in (one[: 160 + num_behind] for one in PROMPTS[:2]):
        tokens(engine, prompt[:161])
        evict(engine)
        assert tokens(engine, prompt) == tokens(plain, prompt)
    num_pages = LOADED_PAGES.get(case.partition(" ")[0], 10)
    assert followed == [num_pages] * 2
    stats = engine.stats().kv_tiers.tiers["host"]
    assert (stats.hit_tokens, stats.mismatches, stats.errors) == (32 * min(10, num_pages), 0, 0)


@pytest.mark.parametrize("case", ["replayed", "gemma3", "gemma3 eager"])
def test_two_passes_follow_loads_one_right_after_the_other(
    tmp_path: Path, followed: list[int], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second load begins while the first pass waits for its own. A load into pages that passes may still read waits
    for that pass, which must not wait for this load in its turn.
    """
    monkeypatch.setattr(load_choice, "MOST_DELAY_S", 10.0)
    architecture, model, settings = CASES[case]
    save_tiny_model(tmp_path, architecture, **model)
    engine = open_engine(tmp_path, **settings | {"step_depth": 1})
    expected = {str(number): tokens(engine, prompt) for number, prompt in enumerate(PROMPTS)}
    evict(engine)
    made: dict[str, list[int]] = {name: [] for name in expected}
    for name, prompt in zip(expected, PROMPTS, strict=True):
        engine.add(Request(request_id=name, prompt_token_ids=prompt, sampling=greedy(5)))
        for output in engine.step():
            made[output.request_id] += output.token_ids
    while engine.has_work:
        for output in engine.step():
            made[output.request_id] += output.token_ids
    assert made == expected
    assert len(followed) >= 2, "no load follows another"
    assert engine.stats().kv_tiers.tiers["host"].mismatches == 0


def test_tokens_are_the_same_when_others_decode_beside_a_pass_that_follows_a_load(
    tmp_path: Path, followed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_choice, "MOST_DELAY_S", 10.0)
    save_tiny_model(tmp_path, "qwen3", head_dim=64)
    engine = open_engine(tmp_path, step_depth=1)
    expected = tokens(engine, PROMPTS[0])
    evict(engine)
    assert tokens(engine, PROMPTS[0], beside=PROMPTS[1:]) == expected
    assert followed == [15]


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize(("case", "num_pages"), [("replayed", 15), ("gemma3", 15 + 3)])
def test_graph_that_waits_is_replayed_once_it_is_captured(
    tmp_path: Path, followed: list[int], case: str, num_pages: int, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the whole pass waits."""
    architecture, model, settings = CASES[case]
    save_tiny_model(tmp_path, architecture, **model)
    engine = open_engine(tmp_path, **settings | {"step_depth": 0})
    executor: Any = engine._runner.executor  # type: ignore[attr-defined]  # it has one
    assert isinstance(executor, CudaExecutor)
    assert set(executor.graphs.following_graphs) == set(executor.graphs.prefill_graphs)
    expected = tokens(engine, PROMPTS[0])
    evict(engine)
    replays, graphs = list[bool](), executor.graphs.following_graphs
    for kind, one in ((False, executor.graphs.prefill_graphs), (True, graphs)):
        for graph in one.values():
            monkeypatch.setattr(graph, "run", noted(graph.run, replays, kind))
    if not captured:
        executor.graphs.following_graphs = {}
    assert tokens(engine, PROMPTS[0]) == expected
    assert followed == [num_pages]
    assert replays[0] is captured
    assert not any(replays[1:])


def noted(run: Callable[..., None], calls: list[bool], kind: bool) -> Callable[..., None]:
    def run_noted(*rows: Any) -> None:
        calls.append(kind)
        run(*rows)

    return run_noted


@pytest.mark.parametrize("eager", [False, True], ids=["replayed", "eager"])
def test_first_layers_are_computed_before_the_last_have_come(tmp_path: Path, eager: bool) -> None:
    save_tiny_model(tmp_path, "qwen3", head_dim=64, num_hidden_layers=10)
    settings = make_settings(tmp_path, page_size=16, kv_host_memory=1 << 24, enforce_eager=eager)
    runner = model_runner.make_runner(settings, read_config(tmp_path), tmp_path, CudaExecutor, reports_layers=True)
    tier, params, pages = runner.host_memory, SamplingParams(temperature=0.0), list(range(10))
    assert isinstance(tier, CudaHostTier)
    groups = tier._layers
    assert len(groups.groups) == 5, "of two layers each"

    def row(start: int, stop: int) -> Row:
        return Row(0, start, stop - start, PROMPTS[0][start:stop], pages, params)

    runner.collect(runner.launch(Batch([row(0, 128)], 0)))
    expected = runner.collect(runner.launch(Batch([row(128, 150)], 0))).tokens
    moves = [PageMove(page, page) for page in range(8)]
    tier.store(0, moves)
    moved(tier)
    runner.pool.storage.fill_(1)
    torch.cuda.synchronize()
    copied, events, reported = groups.copied, list[torch.cuda.Event](), list[LayerProgress]()

    def copied_slowly(group: int) -> None:
        copied(group)
        events.append(torch.cuda.current_stream().record_event())
        torch.cuda._sleep(LATE_CYCLES)  # type: ignore[no-untyped-call]  # torch's

    groups.copied = copied_slowly  # type: ignore[method-assign]  # groups come late
    load = tier.load_layerwise(1, [PageMove(page, page) for page in range(8)])
    batch = Batch([row(128, 150)], 0, report_layers=reported.append, layerwise_loads=[load])
    handle = runner.launch(batch)
    found = list[tuple[int, int]]()
    while not found or found[-1][1] < 10:
        num_copied = sum(event.query() for event in events)
        found.append((num_copied, reported[0].num_done()))
    assert runner.collect(handle).tokens == expected
    assert all(num_done <= 2 * (num_copied + 1) for num_copied, num_done in found), "a layer is attended too early"
    assert any(num_done >= 2 and num_copied < 3 for num_copied, num_done in found), "no layer is attended early"
    assert moved(tier).error == ""


def test_no_text_is_wrong_when_bits_of_main_memory_have_flipped(
    tmp_path: Path, followed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path, "qwen3", head_dim=64)
    monkeypatch.setattr(tier_module, "MOST_MISMATCHES", 1000)
    engine, draw = open_engine(tmp_path, step_depth=1), random.Random(2)
    tiers: Any = engine._tiers
    expected, wrong = tokens(engine, PROMPTS[0]), 0
    for _ in range(20):
        evict(engine)
        pages = tiers._copies.host.page_memory(tiers._host.page(draw.choice(tiers._host.records).key))
        pages[draw.randrange(len(pages))] ^= 1 << draw.randrange(8)
        wrong += tokens(engine, PROMPTS[0]) != expected
    stats = engine.stats()
    assert (stats.kv_tiers.tiers["host"].mismatches, stats.preemptions, wrong) == (20, 20, 0)
    assert len(followed) == 20
