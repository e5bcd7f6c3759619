"""Decodes that select pages make the same text when pages come back from lower tiers with the bounds of their keys."""

import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from mini_infer_engine import LLM, SamplingParams
from mini_infer_engine.core.kv_tiers import tier as tier_module
from mini_infer_engine.runtime.attention.page_scores import key_bounds
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from tests.support.tiny_models import save_tiny_model

PROMPTS = [{"prompt_token_ids": [(place * 7 + shift * 13) % 190 + 5 for place in range(150)]} for shift in range(6)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True, detokenize=False)
SMALL, HOST = 35, 150
"""Pages of the device, of which two sequences take 22, and of main memory."""
IN_SHARED_MEMORY = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no file system in memory here")

Made = tuple[list[list[int]], list[float]]
"""The tokens of each prompt, and the log probabilities of all of them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    save_tiny_model(directory, "qwen3", num_hidden_layers=4, head_dim=32)
    return directory


def open_llm(folder: Path, **settings: Any) -> LLM:
    """Returns an LLM, which loads whatever tiers have."""
    common: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "max_num_seqs": 2, "skip_tokenizer_init": True}
    common |= {"kv_cache_memory": 16_000_000, "page_size": 16, "kv_selection": "quest", "kv_selection_budget": 64}
    llm = LLM(str(folder), **common | settings)
    if "kv_host_memory" in settings:
        llm._engine._rate.committed = lambda step, now_s: None  # type: ignore[method-assign]  # a rate that stays
        llm._engine._tiers._search.compute_tokens_per_s = 1.0  # type: ignore[union-attr]  # it has tiers
    return llm


def page_bytes(llm: LLM) -> int:
    runner: Any = llm._engine._runner
    return int(runner.worker.page_bytes(runner.page_size))


def pool_of(llm: LLM) -> KVPool:
    """Returns the pool of an engine, or of the first of its ranks."""
    runner: Any = llm._engine._runner
    pool = getattr(runner, "local", runner).pool
    assert isinstance(pool, KVPool)
    return pool


def sizes_of(llm: LLM) -> dict[str, int]:
    return {"kv_cache_memory": SMALL * page_bytes(llm), "kv_host_memory": HOST * page_bytes(llm)}


def answers(llm: LLM) -> Made:
    outputs = [request.outputs[0] for request in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    assert not llm._engine.stats().preemptions, "an answer so far is computed as a prompt then"
    logprobs = [
        entry[token].logprob
        for output in outputs
        for entry, token in zip(output.logprobs, output.token_ids, strict=True)
    ]
    return [list(output.token_ids) for output in outputs], logprobs


def assert_same(made: Made, expected: Made) -> None:
    assert made[0] == expected[0]
    assert made[1] == pytest.approx(expected[1], abs=1e-4)


def leave_device(llm: LLM) -> None:
    """Has blocks in lower tiers alone, and nothing on the device that could stand for them."""
    while llm._engine.write_behind():
        llm._engine._tiers.wait(1.0)
    llm._engine.scheduler.kv_cache.reset_prefix_cache()
    pool = pool_of(llm)
    pool.storage.zero_()
    if pool.bounds is not None:
        pool.bounds.pages.zero_()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"step_depth": 1, "long_prefill_token_threshold": 33},
        {"page_size": 32, "kv_selection_budget": 128, "max_num_batched_tokens": 48},
        {"tensor_parallel_size": 2},
    ],
    ids=lambda settings: ",".join(settings) or "defaults",
)
def test_answers_are_those_of_a_large_pool_when_pages_come_back_from_main_memory(
    folder: Path, settings: dict[str, Any]
) -> None:
    alone = {name: value for name, value in settings.items() if name != "tensor_parallel_size"}
    roomy = open_llm(folder, **alone)
    expected = answers(roomy)
    if not settings:
        whole = open_llm(folder, kv_selection="none", kv_selection_budget=None)
        assert answers(whole)[0] != expected[0], "nothing was selected"
    llm = open_llm(folder, **settings, **sizes_of(roomy))
    for _ in range(3):
        assert_same(answers(llm), expected)
        leave_device(llm)
    stats = llm._engine.stats().kv_tiers.tiers["host"]
    assert stats.hit_tokens > 6 * 120
    assert (stats.mismatches, stats.errors) == (0, 0)


def test_answers_are_the_same_after_a_restart_and_blocks_of_other_selections_are_no_hits(
    folder: Path, tmp_path: Path
) -> None:
    roomy = open_llm(folder)
    expected, sizes = answers(roomy), sizes_of(roomy)

    def start(**settings: Any) -> tuple[Made, int]:
        """Returns the answers of an engine, and the tokens that it has hit on the disk."""
        disk = {"kv_disk_path": str(tmp_path), "kv_disk_size": "200MB"}
        llm = open_llm(folder, **sizes, **disk, **settings)
        tiers: Any = llm._engine._tiers
        tiers._copies.disk.join_recovery()
        made = answers(llm)
        while llm._engine.write_behind():
            tiers.wait(1.0)
        tiers._copies.disk._folder.release()  # as the end of the process does
        return made, llm._engine.stats().kv_tiers.tiers["disk"].hit_tokens

    assert start()[1] == 0
    made, hit_tokens = start()
    assert_same(made, expected)
    assert hit_tokens > 6 * 120
    assert start(kv_selection_budget=128)[1] == 0
    assert start(kv_selection="none", kv_selection_budget=None)[1] == 0
    made, hit_tokens = start()
    assert_same(made, expected)
    assert hit_tokens == 0


@IN_SHARED_MEMORY
def test_engines_hit_each_others_blocks_in_a_shared_pool_only_if_they_select_alike(folder: Path) -> None:
    roomy = open_llm(folder)
    expected, sizes, kept = answers(roomy), sizes_of(roomy), []
    with TemporaryDirectory(dir="/dev/shm") as pool:

        def start(**settings: Any) -> tuple[Made, int]:
            llm = open_llm(folder, kv_host_path=pool, **sizes, **settings)
            kept.append(llm)
            made = answers(llm)
            while llm._engine.write_behind():
                llm._engine._tiers.wait(1.0)
            return made, llm._engine.stats().kv_tiers.tiers["host"].hit_tokens

        assert_same(start()[0], expected)
        assert start(kv_selection="none", kv_selection_budget=None)[1] == 0
        assert start(kv_selection_budget=128)[1] == 0
        made, hit_tokens = start()
        assert_same(made, expected)
        assert hit_tokens > 6 * 120


def bounds_by_key(llm: LLM) -> dict[bytes, tuple[torch.Tensor, torch.Tensor]]:
    """Returns copies of the bounds of each cached page and of its keys and values, by the key of its last block."""
    pool, cache = pool_of(llm), llm._engine.scheduler.kv_cache.cache
    assert pool.bounds is not None
    found = {page: cache.whole_page(page) for page in range(pool.num_pages)}
    return {
        blocks[-1].key: (pool.bounds.pages[page].clone(), pool.pages[page].clone())
        for page, blocks in found.items()
        if blocks
    }


def test_bounds_are_exact_and_keys_are_rounded_when_pages_come_back_from_four_bits(folder: Path) -> None:
    llm = open_llm(folder, kv_host_memory=4_000_000, kv_tier_dtype="int4")
    first_token = PARAMS.clone()
    first_token.max_tokens = 1
    llm.generate(PROMPTS, first_token, use_tqdm=False)
    before = bounds_by_key(llm)
    leave_device(llm)
    llm.generate(PROMPTS, first_token, use_tqdm=False)
    after = bounds_by_key(llm)
    assert before.keys() == after.keys()
    assert len(before) == 6 * 9
    for key, (bounds, pages) in before.items():
        assert torch.equal(after[key][0], bounds)
        assert not torch.equal(after[key][1], pages)
        assert torch.equal(bounds[1], key_bounds(pages[None, 3, 0])[0])
    stats = llm._engine.stats().kv_tiers.tiers["host"]
    assert stats.hit_tokens == 6 * 144
    assert (stats.mismatches, stats.errors) == (0, 0)


def test_first_tokens_are_those_without_selection_when_pages_come_back_from_four_bits(folder: Path) -> None:
    """Prompts attend to everything; their log probabilities are as near to exact ones as without selection."""
    roomy = open_llm(folder)
    expected = answers(roomy)[1][:: PARAMS.max_tokens]
    tier = {"kv_host_memory": 4_000_000, "kv_tier_dtype": "int4"}
    whole = open_llm(folder, **tier, kv_selection="none", kv_selection_budget=None)
    selecting = open_llm(folder, **tier)
    for _ in range(3):
        made = answers(selecting)[1][:: PARAMS.max_tokens]
        assert made == pytest.approx(answers(whole)[1][:: PARAMS.max_tokens], abs=1e-4)
        assert sum(abs(one - other) for one, other in zip(made, expected, strict=True)) / len(made) < 0.25
        for llm in (whole, selecting):
            leave_device(llm)
    assert selecting._engine.stats().kv_tiers.tiers["host"].hit_tokens >= 2 * 6 * 144


def test_every_flipped_bit_of_bounds_is_found_and_no_answer_is_wrong(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "MOST_MISMATCHES", 1000)
    roomy, draw = open_llm(folder), random.Random(3)
    expected, sizes = answers(roomy), sizes_of(roomy)
    llm = open_llm(folder, **sizes)
    answers(llm)
    tiers: Any = llm._engine._tiers
    first_byte, num_flipped = pool_of(llm).spec.page_bytes, 0
    for _ in range(3):
        leave_device(llm)
        for record in tiers._host.records:
            if record.blocks[0].parent is None:  # a prompt's first page, which is loaded whatever follows
                memory = tiers._copies.host.page_memory(tiers._host.page(record.key))
                memory[draw.randrange(first_byte, len(memory))] ^= 1 << draw.randrange(8)
                num_flipped += 1
        assert_same(answers(llm), expected)
    assert llm._engine.stats().kv_tiers.tiers["host"].mismatches == num_flipped == 3 * 6


def test_texts_of_a_policy_are_the_same_with_tiers_when_decodes_select_among_what_it_keeps(folder: Path) -> None:
    """No other prompt is served by what a policy has compacted, on the device or below it."""
    policy = {"kv_policy": "snapkv-wide", "kv_budget": 112}
    roomy = open_llm(folder, **policy)
    expected = answers(roomy)
    assert expected[0] != answers(open_llm(folder))[0]
    llm = open_llm(folder, **policy, **sizes_of(roomy))
    for _ in range(2):
        assert_same(answers(llm), expected)
        leave_device(llm)
