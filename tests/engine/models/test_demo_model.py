"""The demo model in fp32 equals transformers, whatever the engine does on the way: caches, chunks, batches."""

from typing import Any

import pytest

from mini_infer_engine import LLM, SamplingParams
from mini_infer_engine.model_path import resolve_model
from tests.support.demo_reference import OUTPUT_TOKENS, Answered, answered_prompts, reference_model
from tests.support.tiny_models import PageDealer, reference_logits, run_chunks, tiny_runner

RELATIVE_TOLERANCE = 5e-6
"""Of the largest logit, which is 26 to 50 here: transformers' own fp32 differs by up to 1.9e-6 of it from fp64."""
PROMPTS = 24
SMALL_POOL_TOKENS, LONGEST_TOKENS = 24 * 16, 336
"""Less than sixteen of the prompts need, and more than the longest with its answer."""


@pytest.fixture(scope="module")
def model() -> Any:
    return reference_model()


@pytest.fixture(scope="module")
def answered(model: Any) -> list[Answered]:
    return answered_prompts(model, PROMPTS)


def make_llm(**settings: Any) -> LLM:
    settings = {"max_model_len": 512, "kv_cache_memory": 64_000_000, **settings}
    return LLM("demo", dtype="float32", device="cpu", skip_tokenizer_init=True, **settings)


def small_pool_bytes() -> int:
    page_bytes = 16 * 8 * 2 * 2 * 64 * 4  # tokens, layers, keys and values, kv heads, head_dim, fp32
    return (SMALL_POOL_TOKENS // 16 + 1) * page_bytes


def test_logits_equal_transformers(model: Any, answered: list[Answered]) -> None:
    runner = tiny_runner(resolve_model("demo", None), kv_cache_memory=100_000_000)
    dealer = PageDealer(runner)
    for case in sorted(answered, key=lambda case: len(case.prompt))[::4]:
        tokens = case.prompt + case.answer
        expected = reference_logits(model, tokens)
        for sizes in ([len(tokens)], [len(case.prompt)] + [1] * len(case.answer)):
            actual = run_chunks(runner, tokens, dealer.table(len(tokens)), sizes)
            assert (actual - expected).abs().max() <= RELATIVE_TOLERANCE * expected.abs().max(), (len(tokens), sizes)


# Every two values of different columns meet in some row of sixteen. A sequence alone has the pool for itself: nothing
# preempts it.
@pytest.mark.parametrize(
    ("batch", "chunk", "caching", "preempting", "depth"),
    [
        (16, 16, True, True, 1),
        (16, 16, False, False, 0),
        (16, 64, True, False, 0),
        (16, 64, False, True, 1),
        (16, 0, True, False, 1),
        (16, 0, False, True, 0),
        (1, 16, True, False, 1),
        (1, 0, False, False, 0),
    ],
)
def test_greedy_text_equals_transformers(
    answered: list[Answered], batch: int, chunk: int, caching: bool, preempting: bool, depth: int
) -> None:
    settings: dict[str, Any] = {}
    if preempting:
        settings = {"kv_cache_memory": small_pool_bytes(), "max_model_len": LONGEST_TOKENS}
    llm = make_llm(
        max_num_seqs=batch,
        long_prefill_token_threshold=chunk,
        enable_prefix_caching=caching,
        step_depth=depth,
        **settings,
    )
    limits = answered if batch > 1 else answered[:8]  # one at a time they take far longer
    sampling_params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS)
    outputs = llm.generate([{"prompt_token_ids": case.prompt} for case in limits], sampling_params, use_tqdm=False)
    different = [
        (index, output.outputs[0].token_ids, case.answer)
        for index, (output, case) in enumerate(zip(outputs, limits, strict=True))
        if output.outputs[0].token_ids != case.answer
    ]
    assert not different
    assert bool(llm._engine.stats().preemptions) == preempting
    assert any(output.num_cached_tokens for output in outputs) == caching
