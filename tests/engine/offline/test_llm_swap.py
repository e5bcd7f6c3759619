"""Preempted sequences whose pages waited in main memory go on exactly where they were, on the demo model."""

import random
from typing import Any

import pytest
import torch

from mini_infer_engine import LLM, SamplingParams
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.core.batch import Transfers
from mini_infer_engine.core.kv_tiers import tier as tier_module
from mini_infer_engine.runtime.memory.kv_pool import KVPool

PROMPTS = [
    f"The {number}th list is sorted, and then its names are joined with a comma, so that" for number in range(12)
]


def open_llm(**settings: Any) -> LLM:
    return LLM("demo", device="cpu", max_model_len=160, max_num_seqs=12, **{"enable_prefix_caching": False} | settings)


def generate(llm: LLM) -> list[str]:
    sampling_params = [
        SamplingParams(temperature=0.7, seed=index, max_tokens=90, ignore_eos=True) for index in range(len(PROMPTS))
    ]
    return [output.outputs[0].text for output in llm.generate(PROMPTS, sampling_params, use_tqdm=False)]


def texts(**settings: object) -> tuple[list[str], int, int]:
    llm = open_llm(**settings)
    made = generate(llm)
    scheduler = llm._engine.scheduler
    return made, scheduler.num_preemptions, scheduler.kv_cache.num_swaps


def test_texts_are_unchanged_when_sequences_are_preempted_and_swapped() -> None:
    expected, preemptions, _ = texts(kv_cache_memory=200_000_000)
    assert preemptions == 0
    small = 6_000_000
    for swap_memory in (0, 100_000_000):
        made, preemptions, swaps = texts(kv_cache_memory=small, kv_swap_memory=swap_memory)
        assert made == expected
        assert preemptions > 0
        assert (swaps > 0) == (swap_memory > 0)


def test_every_flipped_bit_costs_a_recomputation_and_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits of pages that wait in main memory are flipped before each comes back, until swapping is off."""
    expected, _, _ = texts(kv_cache_memory=200_000_000)
    monkeypatch.setattr(tier_module, "MOST_MISMATCHES", 10)
    draw, swap, flipped = random.Random(4), KVPool.swap, list[int]()

    def swap_flipped(pool: KVPool, transfers: Transfers) -> None:
        if transfers.swap_in and draw.random() < 0.7:
            bits = pool.host_pages.view(torch.uint8)
            host_page = draw.choice(transfers.swap_in).host_page
            bits[host_page, draw.randrange(bits.shape[1])] ^= 1 << draw.randrange(8)
            flipped.append(host_page)
        swap(pool, transfers)

    monkeypatch.setattr(KVPool, "swap", swap_flipped)
    for caching in (False, True):
        flipped.clear()
        llm = open_llm(kv_cache_memory=6_000_000, kv_swap_memory=100_000_000, enable_prefix_caching=caching)
        assert generate(llm) == expected
        tier = llm._engine.stats().kv_tiers.tiers["swap"]
        assert tier.mismatches == len(flipped) > 1
        assert tier.capacity_bytes > 50_000_000
        assert tier.used_bytes == 0


def test_nothing_is_swapped_after_three_pages_have_come_back_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _, _ = texts(kv_cache_memory=200_000_000)
    swap = KVPool.swap

    def swap_flipped(pool: KVPool, transfers: Transfers) -> None:
        for one in transfers.swap_in:
            pool.host_pages.view(torch.uint8)[one.host_page, 7] ^= 1
        swap(pool, transfers)

    monkeypatch.setattr(KVPool, "swap", swap_flipped)
    llm = open_llm(kv_cache_memory=6_000_000, kv_swap_memory=100_000_000)
    assert generate(llm) == expected
    tier = llm._engine.stats().kv_tiers.tiers["swap"]
    assert tier_module.MOST_MISMATCHES <= tier.mismatches < 12
    assert not tier.is_on
    assert llm._engine.scheduler.num_preemptions > llm._engine.scheduler.kv_cache.num_swaps


def test_llm_refuses_more_swap_memory_than_the_machine_has() -> None:
    with pytest.raises(ModelError, match="kv_swap_memory = 99,000,000,000,000"):
        LLM("demo", device="cpu", kv_cache_memory=10_000_000, kv_swap_memory="99TB")
