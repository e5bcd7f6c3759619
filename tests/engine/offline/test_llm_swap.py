"""Preempted sequences whose pages waited in main memory go on exactly where they were, on the demo model."""

import pytest

from mini_infer_engine import LLM, SamplingParams
from mini_infer_engine.config.errors import ModelError

PROMPTS = [
    f"The {number}th list is sorted, and then its names are joined with a comma, so that" for number in range(12)
]


def texts(**settings: object) -> tuple[list[str], int, int]:
    llm = LLM("demo", device="cpu", max_model_len=160, max_num_seqs=12, enable_prefix_caching=False, **settings)
    sampling_params = [
        SamplingParams(temperature=0.7, seed=index, max_tokens=90, ignore_eos=True) for index in range(len(PROMPTS))
    ]
    made = [output.outputs[0].text for output in llm.generate(PROMPTS, sampling_params, use_tqdm=False)]
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


def test_llm_refuses_more_swap_memory_than_the_machine_has() -> None:
    with pytest.raises(ModelError, match="kv_swap_memory = 99,000,000,000,000"):
        LLM("demo", device="cpu", kv_cache_memory=10_000_000, kv_swap_memory="99TB")
