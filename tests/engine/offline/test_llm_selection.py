"""Whole engines whose decodes select pages, on the CPU: when the text is the same, and what is refused."""

from pathlib import Path

import pytest
import torch

from mini_infer_engine import LLM, SamplingParams
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.options.kv_selection import budget_fault
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.batch import Batch, PageCopy, Row, Transfers
from mini_infer_engine.runtime.attention.page_scores import key_bounds, page_scores, select_pages
from mini_infer_engine.runtime.attention.selection_limits import check_selection
from mini_infer_engine.runtime.model_runner import ModelRunner
from tests.support.tiny_models import (
    DEEPSEEK,
    GEMMA4,
    GREEDY,
    LFM2,
    PageDealer,
    chunk,
    sampled,
    save_tiny_model,
    tiny_runner,
)

QUEST = {"kv_selection": "quest", "kv_selection_budget": 64}
PARAMS = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    save_tiny_model(directory, "qwen3", num_hidden_layers=4)
    return directory


def prompts(count: int = 6) -> list[dict[str, list[int]]]:
    return [
        {"prompt_token_ids": [(place * 7 + shift * 13) % 190 + 5 for place in range(10 + 30 * shift)]}
        for shift in range(count)
    ]


def open_llm(folder: Path, **settings: object) -> LLM:
    common = {"device": "cpu", "max_model_len": 256, "max_num_seqs": 4, "skip_tokenizer_init": True}
    return LLM(str(folder), **(common | {"kv_cache_memory": 8_000_000} | settings))


def tokens(llm: LLM, params: SamplingParams = PARAMS) -> list[list[list[int]]]:
    return [
        [list(output.token_ids) for output in request.outputs]
        for request in llm.generate(prompts(), params, use_tqdm=False)
    ]


def runner_of(llm: LLM) -> ModelRunner:
    runner = llm._engine._runner
    assert isinstance(runner, ModelRunner)
    return runner


def assert_bounds_of_cached_pages(llm: LLM) -> int:
    """All pages that the prefix cache has whole are bounded by their keys. Returns how many there are."""
    pool, cache = runner_of(llm).pool, llm._engine.scheduler.kv_cache.cache
    assert pool.bounds is not None
    cached = [page for page in range(pool.num_pages) if cache.whole_page(page) is not None]
    for layer in range(pool.spec.num_layers):
        bounds = pool.bounds.of_layer(layer)
        if bounds is not None:
            assert torch.equal(bounds[cached], key_bounds(pool.pages[cached, layer, 0]))
    return len(cached)


def test_text_is_the_same_when_the_budget_covers_the_context(folder: Path) -> None:
    assert tokens(open_llm(folder, kv_selection="quest", kv_selection_budget=256)) == tokens(open_llm(folder))


def test_sequences_within_the_budget_keep_their_text_beside_others(folder: Path) -> None:
    exact, selected = tokens(open_llm(folder)), tokens(open_llm(folder, **QUEST))
    assert selected[:2] == exact[:2], "10 and 40 tokens, and 30 more: less than the budget until the last of them"
    assert selected[2:] != exact[2:], "nothing was selected"


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_prefix_caching": False},
        {"long_prefill_token_threshold": 33},
        {"max_num_batched_tokens": 20},
        {"max_num_seqs": 1},
        {"step_depth": 0},
    ],
    ids=lambda settings: ",".join(settings),
)
def test_text_depends_on_no_schedule(folder: Path, settings: dict[str, object]) -> None:
    assert tokens(open_llm(folder, **QUEST, **settings)) == tokens(open_llm(folder, **QUEST))


def test_bounds_are_right_when_prompts_are_hit_cut_and_preempted(folder: Path) -> None:
    llm = open_llm(folder, **QUEST, long_prefill_token_threshold=21)
    first = tokens(llm)
    assert assert_bounds_of_cached_pages(llm) > 20
    assert tokens(llm) == first
    assert llm._engine.stats().cached_prompt_tokens > 200
    page_bytes = runner_of(llm).worker.page_bytes(16)
    assert page_bytes == runner_of(llm).pool.spec.page_bytes + 2 * 2 * 2 * 24 * 4
    small = open_llm(folder, **QUEST, max_model_len=192, kv_cache_memory=20 * page_bytes)
    assert runner_of(small).num_pages == 19, "the bounds are part of a page's bytes"
    tokens(small)
    assert small._engine.stats().preemptions > 0
    assert assert_bounds_of_cached_pages(small) > 5


@pytest.mark.parametrize("page_size", [16, 32])
def test_bounds_are_right_when_several_answers_share_a_prompt_or_pages_are_swapped(
    folder: Path, page_size: int
) -> None:
    llm = open_llm(folder, **QUEST | {"kv_selection_budget": 128}, page_size=page_size)
    params = SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=40, ignore_eos=True, detokenize=False)
    made = tokens(llm, params)
    assert len({tuple(one) for one in made[-1]}) == 3
    assert assert_bounds_of_cached_pages(llm) > 5
    page_bytes = runner_of(llm).worker.page_bytes(page_size)
    swapping = open_llm(
        folder,
        **QUEST | {"kv_selection_budget": 128},
        page_size=page_size,
        max_model_len=224,
        kv_cache_memory=(24 * 16 // page_size) * page_bytes,
        kv_swap_memory=100 * page_bytes,
    )
    assert tokens(swapping, params) == made
    assert swapping._engine.stats().preemptions > 0


def test_a_copied_page_is_bounded_by_what_its_own_sequence_completes_it_with(folder: Path) -> None:
    """Two sequences share the first 20 tokens of a page; each goes on with tokens of its own."""
    runner = tiny_runner(folder, page_size=32, kv_selection="quest", kv_selection_budget=128)
    dealer, text = PageDealer(runner), [(place * 11) % 180 + 5 for place in range(64)]
    pages, copy = dealer.table(64), dealer.table(32)
    runner.collect(runner.launch(Batch([chunk(0, text, 0, 20, pages)], 0)))
    other = [*text[:20], *range(100, 112)]
    transfers = Transfers(copies=[PageCopy(pages[0], copy[0], 20)])
    rows = [chunk(0, text, 20, 12, pages, sampling=GREEDY), chunk(1, other, 20, 12, copy, sampling=GREEDY)]
    runner.collect(runner.launch(Batch(rows, 0, transfers)))
    assert runner.pool.bounds is not None
    bounds = runner.pool.bounds.of_layer(2)
    assert bounds is not None
    for page in (pages[0], copy[0]):
        assert torch.equal(bounds[page], key_bounds(runner.pool.pages[[page], 2, 0])[0])
    assert not torch.equal(bounds[pages[0]], bounds[copy[0]])


def test_a_page_is_bounded_when_a_decode_completes_it_and_read_when_its_keys_match(folder: Path) -> None:
    """Logits of a decode are those of attention to the selected pages alone, whichever those are."""
    runner, text = tiny_runner(folder, **QUEST), [(place * 11) % 180 + 5 for place in range(160)]
    table = PageDealer(runner).table(160)
    runner.collect(runner.launch(Batch([chunk(0, text, 0, 141, table, sampling=GREEDY)], 0)))
    assert runner.pool.bounds is not None
    bounds = runner.pool.bounds.of_layer(3)
    assert bounds is not None
    for start in range(141, 148):
        assert bounds[table[8]].any() == (start > 143), "page 8 has the tokens 128 to 143"
        assert len(sampled(runner.collect(runner.launch(Batch([Row(0, start, 1, None, table, GREEDY)], 1))))) == 1
    keys = runner.pool.pages[table[:9], 3, 0]
    assert torch.equal(bounds[table[:9]], key_bounds(keys))
    queries = torch.randn(1, 2, 2, 24, generator=torch.Generator().manual_seed(0))
    queries[0, 0, 1] = keys[5, 3, 0] * 9
    chosen = select_pages(page_scores(queries, bounds[table[:10]].unsqueeze(0)), torch.tensor([9]), 4)
    assert chosen[0, 0].tolist() == [0, 5, 8, 9]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kv_selection_budget": 64}, "--kv-selection-budget"),
        ({"kv_selection": "quest", "kv_selection_budget": 100, "page_size": 16}, "--kv-selection-budget = 100"),
        ({"kv_selection": "quest", "kv_selection_budget": 100}, "--kv-selection-budget = 100"),
        ({"kv_selection": "quest", "kv_selection_budget": 96, "page_size": 32}, "128 tokens"),
        ({**QUEST, "speculative_method": "ngram"}, "--speculative-method"),
        ({**QUEST, "pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({**QUEST, "kv_cache_dtype": "int8"}, "kv_selection"),
    ],
)
def test_llm_is_refused_when_options_do_not_go_with_selection(
    folder: Path, settings: dict[str, object], named: str
) -> None:
    with pytest.raises((ModelError, ValueError), match=named):
        open_llm(folder, **settings)


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        ("deepseek_v2", DEEPSEEK, "latents"),
        ("gemma3_text", {"head_dim": 16, "sliding_window": 11}, "windows"),
        ("gemma4_text", GEMMA4, "KV heads"),
        ("lfm2", LFM2, "recurrent"),
    ],
)
def test_models_are_refused_when_their_attention_has_no_pages_to_select(
    tmp_path: Path, architecture: str, changes: dict[str, object], named: str
) -> None:
    save_tiny_model(tmp_path, architecture, **changes)
    with pytest.raises(ModelError, match=named):
        open_llm(tmp_path, **QUEST)


def test_transfer_of_pages_is_refused(folder: Path) -> None:
    runner = tiny_runner(folder)
    settings = EngineSettings(model=str(folder), **QUEST)
    check_selection(settings, runner.config, "cpu", moves_kv=False)
    with pytest.raises(ModelError, match="--transfer-port"):
        check_selection(settings, runner.config, "cpu", moves_kv=True)


def test_the_default_budget_is_a_number_of_pages_of_every_default_size() -> None:
    settings = EngineSettings(model="any", kv_selection="quest")
    assert [budget_fault(settings, size) for size in (16, 128, 256)] == [None] * 3
