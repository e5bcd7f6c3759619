"""The prefix cache's tier in pinned memory: pages come back as they went, and texts are those of a GPU large enough."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.config.options.kv_selection import DENSE_LAYERS
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.kv_tiers.tier_memory import PageMove, StateMove
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.kernels.page_digest import PageSums
from mini_infer_engine.kv_host.open_pool import open_pool
from mini_infer_engine.kv_transfer.token_digests import GOLDEN, MODULUS
from mini_infer_engine.runtime.attention.page_scores import key_bounds
from mini_infer_engine.runtime.memory.cuda_host_tier import CudaHostTier
from mini_infer_engine.runtime.memory.page_codec import RawPages
from mini_infer_engine.runtime.memory.swap_digests import SwapCheck, SwapDigests
from tests.gpu.device import DEVICE, GPU_ONLY, KERNELS
from tests.gpu.runs import make_engine, make_runner, make_settings, texts
from tests.gpu.test_recurrent_speculation import MODELS
from tests.support.tier_copies import flips_found, moved
from tests.support.tiny_models import DEEPSEEK, save_tiny_model

Test = Callable[..., None]


def on_kernels(test: Test) -> Test:
    """Runs on a GPU, or under Triton's interpreter."""
    return reduce(lambda marked, mark: mark(marked), KERNELS, test)


def on_gpu(test: Test) -> Test:
    return reduce(lambda marked, mark: mark(marked), GPU_ONLY, test)


def digests_of(words: torch.Tensor, pages: list[int], first: int) -> np.ndarray:
    factors = (2 * np.arange(first, first + words.shape[1], dtype=np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    return np.array([np.dot(words[page].numpy().view(np.uint64), factors) for page in pages], np.uint64)


@on_kernels
@pytest.mark.parametrize("num_words", [1, 40, 2048, 2049, 9000])
@pytest.mark.parametrize("first", [0, 77])
def test_digest_is_that_of_a_cpu(num_words: int, first: int) -> None:
    words, pages = torch.randint(-(2**63), 2**63 - 1, (5, num_words), dtype=torch.int64), [4, 0, 2]
    sums = PageSums(words.to(DEVICE), first, GOLDEN - MODULUS)
    expected = digests_of(words, pages, first)
    for more in (0, 3):  # the parts of a page are added up
        numbers = torch.tensor([[more] * 3, pages]).to(DEVICE)
        sums.add(numbers)
        assert numbers[0].cpu().numpy().view(np.uint64).tolist() == (expected + np.uint64(more)).tolist()


@on_kernels
@pytest.mark.parametrize("num_words", [40, 9000])
def test_differences_from_known_digests_name_the_pages_that_have_changed(num_words: int) -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (5, num_words), dtype=torch.int64)
    known = torch.zeros(7, dtype=torch.int64)
    known[torch.tensor([6, 1, 3])] = torch.from_numpy(digests_of(words, [4, 0, 2], 0).view(np.int64))
    words[0, num_words - 1] ^= 1 << 40
    numbers = torch.tensor([[0] * 3, [4, 0, 2], [6, 1, 3]]).to(DEVICE)
    PageSums(words.to(DEVICE), 0, GOLDEN - MODULUS).add(numbers, known.to(DEVICE))
    assert (numbers[0] != 0).tolist() == [False, True, False]


@on_gpu
@pytest.mark.parametrize("widths", [(4096,), (3000, 40)])
def test_swapped_rows_are_proved(widths: tuple[int, ...]) -> None:
    parts = [torch.randint(-(2**62), 2**62, (8, width), device=DEVICE) for width in widths]
    digests = SwapDigests(parts, 5)
    digests.prepare()
    digests.left([1, 7, 2], [4, 0, 3])
    digests.left([5], [1])
    assert SwapCheck([digests.returned([7, 5, 1], [0, 1, 4])]).faults() == []
    parts[-1][5, 39] ^= 1
    found = digests.returned([7, 5], [0, 1])
    assert SwapCheck([found]).faults() == [1]
    assert SwapCheck([found, digests.returned([1, 2], [3, 3])]).faults() == [1, 2]


@on_gpu
@pytest.mark.parametrize("widths", [(4096,), (3000, 40)])
def test_every_bit_flip_is_found_when_pages_come_back(widths: tuple[int, ...]) -> None:
    parts = [torch.randint(-(2**62), 2**62, (8, width), device=DEVICE) for width in widths]
    before = [part.clone() for part in parts]
    tier = CudaHostTier(RawPages(parts), 4, b"")
    tier.store(0, [PageMove(page + 1, page) for page in range(4)])
    stored = moved(tier).digests
    assert flips_found(tier, tier.load, stored, 200, target=6) == 200
    tier.load(1000, [PageMove(0, 6), PageMove(3, 7)])
    assert moved(tier).digests == [stored[0], stored[3]]
    for old, new in zip(before, parts, strict=True):
        assert torch.equal(new[6], old[1])
        assert torch.equal(new[7], old[4])


@on_gpu
@pytest.mark.parametrize("num_words", [9_000_001, 2048, 100])
def test_every_bit_flip_is_found_when_states_come_back(num_words: int) -> None:
    """A state takes 36 MB, a whole number of pages, or less than one."""
    draw, page_words = random.Random(2), 1024
    pages = torch.randint(-(2**62), 2**62, (8, page_words), device=DEVICE)
    states = torch.randint(-(2**62), 2**62, (3, num_words), device=DEVICE)
    before, count = states.clone(), -(-num_words // page_words)
    tier = CudaHostTier(RawPages([pages]), 2 * count + 1, b"", None, states, count)
    places = [tuple(range(count)), tuple(range(count + 1, 2 * count + 1))]
    tier.store(0, [PageMove(1, count)], [StateMove(2, places[0]), StateMove(0, places[1])])
    stored = moved(tier).digests
    states[1:] = 0
    tier.load(1, [PageMove(count, 6)], [StateMove(1, places[0])])
    assert moved(tier).digests == stored[:2]
    assert torch.equal(states[1], before[2])
    assert torch.equal(states[0], before[0])
    assert torch.equal(pages[6], pages[1])
    for number in range(20):
        word, bit = draw.randrange(num_words), np.uint64(1 << draw.randrange(64))
        tier.words[places[1][word // page_words], word % page_words] ^= bit
        tier.load(2 + number, [], [StateMove(1, places[1])])
        assert moved(tier).digests[0] != stored[2]
        tier.words[places[1][word // page_words], word % page_words] ^= bit
    tier.load(100, [], [StateMove(1, places[1])])
    assert moved(tier).digests == stored[2:]


@on_gpu
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no file system in memory here")
def test_page_is_loaded_by_another_engine_when_one_has_stored_it_in_shared_memory() -> None:
    def tier(parts: list[torch.Tensor], folder: str) -> CudaHostTier:
        shared = open_pool(folder, 1 << 20, 8 * sum(part.shape[1] for part in parts), 16, "0" * 64)
        return CudaHostTier(RawPages(parts), shared.layout.num_slots, b"", shared)

    before = [torch.randint(-(2**62), 2**62, (8, width), device=DEVICE) for width in (1024, 8)]
    after = [torch.zeros_like(part) for part in before]
    with TemporaryDirectory(dir="/dev/shm") as folder:
        one, other = tier(before, folder), tier(after, folder)
        one.store(0, [PageMove(2, 3), PageMove(5, 0)])
        stored = moved(one)
        other.load(0, [PageMove(3, 6), PageMove(0, 1)])
        assert moved(other).digests == stored.digests
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[[6, 1]], old[[2, 5]])


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 64},
    "deepseek_v2": DEEPSEEK | {"hidden_size": 128},
    "gemma3_text": {
        "head_dim": 64,
        "num_hidden_layers": 4,
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
    },
}


def sessions(num_sessions: int, num_turns: int) -> list[list[Request]]:
    """Rounds of growing prompts: each session's next prompt begins with its last one."""
    dice = random.Random(5)
    prompts = [[dice.randrange(199) for _ in range(90)] for _ in range(num_sessions)]
    rounds = []
    for turn in range(num_turns):
        made = []
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=0.7 * (number % 2), max_tokens=8, ignore_eos=True)
            name = f"{number}.{turn}"
            made.append(
                Request(
                    request_id=name, prompt_token_ids=list(prompt), sampling=sampling, noise_seed=100 * turn + number
                )
            )
            prompt += [dice.randrange(199) for _ in range(24)]
        rounds.append(made)
    return rounds


def engine_that_loads(settings: EngineSettings) -> Engine:
    """A model so small is computed sooner than copied: that is the engine's choice, and not what is tested here."""
    runner = make_runner(settings)
    runner.swap_space = replace(runner.swap_space, compute_s_per_token=1.0)
    engine = make_engine(settings, runner)
    engine._rate.committed = lambda step, now_s: None  # type: ignore[method-assign]  # a rate that stays
    return engine


@on_gpu
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3", {"step_depth": 1}),
        ("qwen3", {"step_depth": 0, "enforce_eager": True}),
        ("qwen3", {"kv_cache_dtype": "int8"}),
        ("deepseek_v2", {}),
        ("gemma3_text", {"disable_hybrid_kv_cache_manager": False}),
    ],
)
def test_texts_are_those_of_a_pool_that_is_large_enough(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    save_tiny_model(tmp_path, name, **SHAPES[name])
    common = {"page_size": 16, "max_model_len": 256} | changes
    settings = make_settings(tmp_path, **common)
    runner = make_runner(settings)
    roomy = make_engine(settings, runner)
    expected = [texts(roomy, one) for one in sessions(12, 4)]
    page_bytes = runner.pool.spec.page_bytes
    memory = {"kv_cache_memory": 61 * page_bytes, "kv_host_memory": 400 * page_bytes}
    settings = make_settings(tmp_path, **common, **memory)
    engine = engine_that_loads(settings)
    made = []
    for one in sessions(12, 4):
        made.append(texts(engine, one))
        while engine.write_behind():
            pass
    assert made == expected
    stats = engine.stats().kv_tiers.tiers["host"]
    assert stats.hit_tokens > 1_000
    assert (stats.mismatches, stats.errors) == (0, 0)


SELECTION: dict[str, Any] = {"kv_selection": "quest", "kv_selection_budget": 64}
"""A budget of less than half of what most of the sessions' decodes could attend to."""
FOUR_LAYERS: dict[str, Any] = {"head_dim": 64, "num_hidden_layers": 4}


def bounded_pages(engine: Engine) -> dict[bytes, tuple[torch.Tensor, torch.Tensor]]:
    """Returns copies of each cached page and of the bounds of its keys, by the key of its last block."""
    pool, cache = engine._runner.pool, engine.scheduler.kv_cache.cache  # type: ignore[attr-defined]  # it has a model
    found = {page: cache.whole_page(page) for page in range(pool.num_pages)}
    return {
        blocks[-1].key: (pool.pages[page].clone(), pool.bounds.pages[page].clone())
        for page, blocks in found.items()
        if blocks
    }


def leave_device(engine: Engine) -> None:
    """Has blocks in main memory alone, and nothing on the device that could stand for them."""
    while engine.write_behind():
        engine._tiers.wait(1.0)
    engine.scheduler.kv_cache.reset_prefix_cache()
    pool = engine._runner.pool  # type: ignore[attr-defined]  # it has a model
    pool.storage.zero_()
    pool.bounds.pages.zero_()
    torch.cuda.synchronize()  # loads have a stream of their own


@on_gpu
@pytest.mark.parametrize(
    "changes",
    [
        {"step_depth": 1},
        {"step_depth": 0, "enforce_eager": True},
        {"step_depth": 1, "long_prefill_token_threshold": 33},
        {"page_size": 32, "kv_selection_budget": 128},
    ],
    ids=str,
)
def test_texts_are_those_of_a_large_pool_when_decodes_select_among_pages_that_come_back(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Four sequences at a time, so that none is preempted: its answer so far would be computed as a prompt."""
    save_tiny_model(tmp_path, "qwen3", **FOUR_LAYERS)
    common = {"page_size": 16, "max_model_len": 256, "max_num_seqs": 4} | SELECTION | changes
    settings = make_settings(tmp_path, **common)
    runner = make_runner(settings)
    roomy = make_engine(settings, runner)
    expected = [texts(roomy, one) for one in sessions(12, 4)]
    page_bytes = runner.worker.page_bytes(runner.page_size)
    memory = {"kv_cache_memory": 61 * page_bytes, "kv_host_memory": 400 * page_bytes}
    engine = engine_that_loads(make_settings(tmp_path, **common, **memory))
    for one, text in zip(sessions(12, 4), expected, strict=True):
        assert texts(engine, one) == text
        found = bounded_pages(engine)
        assert found
        for pages, bounds in found.values():
            assert torch.equal(bounds, key_bounds(pages[DENSE_LAYERS:, 0]))
        leave_device(engine)
    stats = engine.stats()
    host = stats.kv_tiers.tiers["host"]
    assert host.hit_tokens > 3_000
    assert (host.mismatches, host.errors, stats.preemptions) == (0, 0, 0)
    whole = make_settings(tmp_path, **common | {"kv_selection": "none", "kv_selection_budget": None})
    assert texts(make_engine(whole, make_runner(whole)), sessions(12, 4)[-1]) != expected[-1], "nothing was selected"


@on_gpu
def test_bounds_are_exact_and_keys_are_rounded_when_pages_come_back_from_four_bits(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3", **FOUR_LAYERS)
    tier = {"kv_host_memory": 1 << 24, "kv_tier_dtype": "int4"}
    engine = engine_that_loads(make_settings(tmp_path, page_size=16, max_model_len=256, **SELECTION, **tier))

    def answer() -> dict[bytes, tuple[torch.Tensor, torch.Tensor]]:
        for number in range(12):
            prompt, one = [(place * 7 + number * 13) % 190 for place in range(150)], SamplingParams(max_tokens=1)
            engine.add(Request(request_id=str(number), prompt_token_ids=prompt, sampling=one))
        while engine.has_work:
            engine.step()
        return bounded_pages(engine)

    before = answer()
    leave_device(engine)
    after = answer()
    assert len(before) == 12 * 9
    assert before.keys() == after.keys()
    for key, (pages, bounds) in before.items():
        assert not torch.equal(after[key][0], pages)
        assert torch.equal(after[key][1], bounds)
    stats = engine.stats().kv_tiers.tiers["host"]
    assert stats.hit_tokens == 12 * 144
    assert (stats.mismatches, stats.errors) == (0, 0)


@on_gpu
@pytest.mark.parametrize("kind", ["qwen3-next", "granite-hybrid", "lfm2"])
@pytest.mark.parametrize("step_depth", [0, 1])
def test_texts_are_those_of_a_large_pool_when_states_come_back(tmp_path: Path, kind: str, step_depth: int) -> None:
    architecture, changes = MODELS[kind]
    save_tiny_model(tmp_path, architecture, **changes)
    settings = make_settings(tmp_path, page_size=16, max_model_len=256, step_depth=step_depth)
    runner = make_runner(settings)
    roomy = make_engine(settings, runner)
    expected = [texts(roomy, one) for one in sessions(12, 4)]
    page_bytes, states = runner.pool.spec.page_bytes, runner.pool.states
    assert states is not None
    small = 61 * page_bytes + 40 * states.slots.slot_bytes
    memory = {"kv_cache_memory": small, "kv_host_memory": 400 * page_bytes + 200 * states.slots.slot_bytes}
    settings = make_settings(tmp_path, page_size=16, max_model_len=256, step_depth=step_depth, **memory)
    engine = engine_that_loads(settings)
    made = []
    for one in sessions(12, 4):
        made.append(texts(engine, one))
        while engine.write_behind():
            pass
        engine.scheduler.kv_cache.reset_prefix_cache()
    assert made == expected
    stats = engine.stats().kv_tiers.tiers["host"]
    assert stats.hit_tokens > 1_000
    assert (stats.mismatches, stats.errors) == (0, 0)
