"""A pass on a CPU follows a load layer by layer: it reads the first layers before the last ones have come."""

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mini_infer_engine import LLM
from mini_infer_engine.config.model.kv_groups import KVGroup, kv_cache_config, uniform_kv_cache
from mini_infer_engine.config.model.model_config import HeadShape
from mini_infer_engine.config.options.kv_selection import DENSE_LAYERS
from mini_infer_engine.core.kv_tiers import tier as tier_module
from mini_infer_engine.core.kv_tiers.tier_memory import PageMove
from mini_infer_engine.core.prefix_cache import MISS
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.layers.attention import AttentionBlock
from mini_infer_engine.models.kv_spec import INT8, KVSpec
from mini_infer_engine.runtime.inputs.layer_progress import LoadedAttention
from mini_infer_engine.runtime.memory import cpu_host_tier, layerwise_load
from mini_infer_engine.runtime.memory.cpu_host_tier import CpuHostTier
from mini_infer_engine.runtime.memory.hidden_pages import HiddenPages
from mini_infer_engine.runtime.memory.key_bounds import KeyBounds
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from mini_infer_engine.runtime.memory.layerwise_load import CopiedLayers
from mini_infer_engine.runtime.memory.loaded_layers import groups_to_await
from mini_infer_engine.runtime.memory.make_host_tier import make_host_tier
from mini_infer_engine.runtime.memory.quantized_pool import make_pool
from tests.engine.runtime.test_kv_pool_and_attention import CPU, SPEC
from tests.support.tier_copies import flips_found, moved
from tests.support.tiny_models import DEEPSEEK, DEEPSEEK_V32, GPT_OSS, save_tiny_model

NUM_PAGES = 12


def filled_tier() -> tuple[KVPool, CpuHostTier, Sequence[int]]:
    """Returns a pool of random pages, a tier that has them in reverse order, and their digests."""
    pool = make_pool(SPEC, NUM_PAGES, CPU)
    pool.storage.copy_(torch.randn(pool.storage.shape))
    tier = make_host_tier(pool, NUM_PAGES * SPEC.page_bytes, b"")
    assert isinstance(tier, CpuHostTier)
    tier.store(0, [PageMove(page, NUM_PAGES - 1 - page) for page in range(NUM_PAGES)])
    return pool, tier, moved(tier).digests


@pytest.mark.parametrize("sources", [[3], [0, 1, 2, 3], [5, 4, 3], [7, 2, 3, 9, 10, 11], []])
def test_pages_and_digests_are_those_of_whole_loads(sources: list[int]) -> None:
    pool, tier, digests = filled_tier()
    before = pool.storage.clone()
    pool.storage.zero_()
    targets = list(range(len(sources)))
    load = tier.load_layerwise(7, [PageMove(*pair) for pair in zip(sources, targets, strict=True)])
    load.wait_for_layer(SPEC.num_layers - 1)
    assert torch.equal(pool.storage[targets], before[[NUM_PAGES - 1 - source for source in sources]])
    assert not pool.storage[len(sources) :].any()
    ended = moved(tier)
    assert (ended.ticket, ended.error) == (7, "")
    assert list(ended.digests) == [digests[NUM_PAGES - 1 - source] for source in sources]


def test_every_bit_flip_is_found_when_pages_come_layer_by_layer() -> None:
    _, tier, digests = filled_tier()
    assert flips_found(tier, tier.load_layerwise, digests[::-1], 300, target=5) == 300


def test_a_layer_is_there_while_the_next_one_has_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, tier, _ = filled_tier()
    before = pool.pages.clone()
    pool.storage.zero_()
    may_go_on = [threading.Event() for _ in range(SPEC.num_layers + 1)]
    may_go_on[0].set()
    copied = CopiedLayers.copied

    def copied_slowly(layers: CopiedLayers, count: int) -> None:
        copied(layers, count)
        assert count > SPEC.num_layers or may_go_on[count].wait(10)

    monkeypatch.setattr(CopiedLayers, "copied", copied_slowly)
    load = tier.load_layerwise(0, [PageMove(0, 2), PageMove(1, 1)])
    for layer in range(SPEC.num_layers):
        load.wait_for_layer(layer)
        expected = before[[NUM_PAGES - 1, NUM_PAGES - 2]]
        assert torch.equal(pool.pages[[2, 1], : layer + 1], expected[:, : layer + 1])
        assert not pool.pages[[2, 1], layer + 1 :].any()
        assert tier.take() == []
        may_go_on[layer + 1].set()
    assert moved(tier).error == ""


def test_pass_goes_on_and_the_copy_reports_the_error_when_a_layer_cannot_be_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, tier, _ = filled_tier()
    copyto, calls = np.copyto, list[object]()

    def fail_at_second(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError("a bad bank")
        copyto(*args)

    monkeypatch.setattr(layerwise_load.np, "copyto", fail_at_second)
    load = tier.load_layerwise(3, [PageMove(0, 2)])
    load.wait_for_layer(0)
    load.wait_for_layer(SPEC.num_layers - 1)
    ended = moved(tier)
    assert (ended.ticket, ended.error) == (3, "MemoryError: a bad bank")
    assert len(calls) == 2
    monkeypatch.undo()
    tier.load_layerwise(4, [PageMove(0, 99)]).wait_for_layer(SPEC.num_layers)
    assert "Error" in moved(tier).error


def test_load_does_not_wait_for_what_is_written_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    _, tier, _ = filled_tier()
    may_go_on = threading.Event()
    monkeypatch.setattr(tier, "_store", lambda _: int(may_go_on.wait(10)))
    tier.store(1, [PageMove(5, 5)])
    tier.load_layerwise(2, [PageMove(0, 2)]).wait_for_layer(SPEC.num_layers - 1)
    assert moved(tier).ticket == 2
    may_go_on.set()
    assert moved(tier).ticket == 1


def test_layers_of_a_pool_are_loaded_one_by_one_only_where_each_is_whole() -> None:
    def num_layers(pool: KVPool, dtype: str = "auto") -> int:
        tier = make_host_tier(pool, 10**6, b"", dtype)
        assert tier is not None
        assert (tier.layerwise is not None) == (tier.num_layers > 0)
        return tier.num_layers

    wide = replace(SPEC, head_dim=32)
    assert num_layers(KVPool(SPEC, NUM_PAGES, CPU)) == SPEC.num_layers
    assert num_layers(make_pool(replace(SPEC, quantization=INT8), NUM_PAGES, CPU)) == SPEC.num_layers
    assert num_layers(KVPool(replace(SPEC, entries=1), NUM_PAGES, CPU)) == SPEC.num_layers
    assert num_layers(KVPool(wide, NUM_PAGES, CPU), "int4") == 0
    windows = kv_cache_config([None, 20] * (SPEC.num_layers // 2), 200)
    of_windows = replace(SPEC, num_layers=windows.layers_per_page)
    assert num_layers(KVPool(of_windows, NUM_PAGES, CPU, kv_cache=windows)) == SPEC.num_layers // 2
    units = uniform_kv_cache(2, units=(1, 2))
    mixed = KVSpec.mixed([HeadShape(2, 8), HeadShape(2, 16)], 16, torch.float32)
    assert num_layers(make_pool(replace(mixed, num_layers=units.layers_per_page), NUM_PAGES, CPU, kv_cache=units)) == 0
    recurrent = replace(uniform_kv_cache(SPEC.num_layers), state_group=KVGroup("recurrent_state", (0,)))
    assert num_layers(KVPool(SPEC, NUM_PAGES, CPU, kv_cache=recurrent)) == 0
    beside = KVPool(SPEC, NUM_PAGES, CPU)
    beside.hidden = HiddenPages(NUM_PAGES, SPEC.page_size, 24, torch.bfloat16, CPU)
    assert num_layers(beside) == 0
    for count, expected in ((DENSE_LAYERS, DENSE_LAYERS), (DENSE_LAYERS + 1, 0)):
        selecting = KVPool(replace(SPEC, num_layers=count), NUM_PAGES, CPU)
        selecting.bounds = KeyBounds(selecting.spec, NUM_PAGES, 4, CPU)
        assert num_layers(selecting) == expected, "first layers select nothing, so that they have no bounds"


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([0, 0, 1, 1, 2], {0: 0, 2: 1, 4: 2}),
        ([0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1], {0: 0, 6: 1}),  # places of layers of several KV groups
        ([0, 1, 0, 1, 2], {0: 0, 1: 1, 4: 2}),  # the layers of each KV group follow one another
        ([2, 0, 1], {0: 2}),
        ([], {}),
    ],
)
def test_a_layer_waits_when_it_reads_what_none_before_it_has_waited_for(
    groups: list[int], expected: dict[int, int]
) -> None:
    assert groups_to_await(groups) == expected


# On an engine.

PROMPTS = [[(place * 7 + shift * 13) % 190 + 5 for place in range(90)] for shift in range(4)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


def open_llm(folder: Path, **settings: Any) -> LLM:
    """Returns an LLM with main memory below its KV cache, which loads whatever is there."""
    common = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 4, "skip_tokenizer_init": True}
    llm = LLM(str(folder), **common | {"kv_cache_memory": 4_000_000, "kv_host_memory": 4_000_000} | settings)
    llm._engine._rate.committed = lambda step, now_s: None  # type: ignore[method-assign]  # a rate that stays
    if settings.get("kv_host_memory") != 0:
        llm._engine._runner.host_memory.least_load_s = 0.0  # type: ignore[union-attr]  # its pages are small
        llm._engine._tiers._search.compute_tokens_per_s = 1.0  # type: ignore[union-attr]  # it has tiers
    return llm


def request(prompt: list[int]) -> Request:
    return Request(request_id="only", prompt_token_ids=prompt, sampling=PARAMS)


def tokens(llm: LLM, prompt: list[int]) -> list[int]:
    llm._engine.add(request(prompt))
    made = list[int]()
    while llm._engine.has_work:
        made += [token for output in llm._engine.step() for token in output.token_ids]
    return made


def evict(llm: LLM) -> None:
    """Has the blocks that are cached in main memory alone."""
    while llm._engine.write_behind():
        llm._engine._tiers.wait(1.0)
    llm._engine.scheduler.kv_cache.reset_prefix_cache()


@pytest.fixture
def num_layerwise(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the number of pages of each load that went with a pass."""
    counts, copy_layers = list[int](), cpu_host_tier.copy_layers

    def counted(source: Any, target: Any, moves: Sequence[PageMove], num_layers: int, layers: CopiedLayers) -> None:
        counts.append(len(moves))
        copy_layers(source, target, moves, num_layers, layers)

    monkeypatch.setattr(cpu_host_tier, "copy_layers", counted)
    return counts


GEMMA: dict[str, object] = {
    "head_dim": 16,
    "num_hidden_layers": 6,
    "sliding_window": 40,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
}
"""Three KV groups of two layers each, two of them with a window of three pages."""
WINDOWED: dict[str, object] = {"disable_hybrid_kv_cache_manager": False}


@pytest.mark.parametrize(
    ("architecture", "changes", "settings", "num_pages"),
    [
        ("qwen3", {}, {}, 5),
        ("qwen3", {}, {"step_depth": 1, "long_prefill_token_threshold": 16}, 5),
        ("qwen3", {}, {"kv_cache_dtype": "int8", "step_depth": 1}, 5),
        ("qwen3", {}, {"speculative_method": "ngram", "num_speculative_tokens": 2}, 5),
        ("deepseek_v2", DEEPSEEK, {}, 5),
        ("gemma3_text", GEMMA, WINDOWED, 5 + 2 * 3),
        ("gemma3_text", GEMMA, WINDOWED | {"step_depth": 1, "kv_cache_dtype": "int8"}, 5 + 2 * 3),
        ("gemma3_text", GEMMA, WINDOWED | {"step_depth": 1, "long_prefill_token_threshold": 4}, 5 + 2 * 3),
        ("gpt_oss", GPT_OSS | {"num_hidden_layers": 4}, WINDOWED, 5 + 1),
        ("mistral", {"sliding_window": 40}, WINDOWED | {"speculative_method": "ngram", "num_speculative_tokens": 2}, 3),
    ],
)
def test_tokens_are_the_same_when_passes_follow_their_loads(
    tmp_path: Path,
    num_layerwise: list[int],
    architecture: str,
    changes: dict[str, object],
    settings: dict[str, object],
    num_pages: int,
) -> None:
    save_tiny_model(tmp_path, architecture, **changes)
    plain, llm = open_llm(tmp_path, kv_host_memory=0, **settings), open_llm(tmp_path, **settings)
    host: Any = llm._engine._runner.host_memory
    for number in range(8):
        prompt = PROMPTS[number % 4]
        assert tokens(llm, prompt) == tokens(plain, prompt)
        evict(llm)
        host.num_layers = host.num_layers if number < 5 else 0
    assert num_layerwise == [num_pages] * 2, "two prompts came back with their passes, two before them"
    stats = llm._engine.stats().kv_tiers.tiers["host"]
    assert stats.hit_tokens == 4 * 16 * min(num_pages, 5)
    assert (stats.mismatches, stats.errors) == (0, 0)


@pytest.mark.parametrize(
    ("architecture", "changes", "settings"),
    [
        ("qwen3", {}, {}),
        ("qwen3", {}, {"kv_cache_dtype": "int8"}),
        ("deepseek_v2", DEEPSEEK, {}),
        ("deepseek_v32", DEEPSEEK_V32, {}),
        ("gemma3_text", GEMMA, WINDOWED),
        ("gpt_oss", GPT_OSS | {"num_hidden_layers": 4}, WINDOWED),
        ("mistral", {"sliding_window": 40}, WINDOWED),
    ],
)
def test_first_layers_attend_before_the_last_are_copied(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    changes: dict[str, object],
    settings: dict[str, object],
) -> None:
    """No layer of pages is copied before the one before it has been attended to, in all KV groups: a pass that waited
    for all would never end.
    """
    save_tiny_model(tmp_path, architecture, **changes)
    llm = open_llm(tmp_path, **settings)
    expected = tokens(llm, PROMPTS[0])
    evict(llm)
    llm._engine._runner.pool.storage.zero_()  # type: ignore[attr-defined]  # whoever reads too early reads zeros
    attend, copied = LoadedAttention.attend, CopiedLayers.copied
    order, has_attended = list[tuple[str, int]](), [threading.Event() for _ in range(8)]
    places = [place for _, place in llm._engine._runner.pool.places]  # type: ignore[attr-defined]  # it has a pool
    last_of_place = {place: layer for layer, place in enumerate(places)}

    def attend_noted(attention: LoadedAttention, qkv: Tensor, layer: AttentionBlock) -> Tensor:
        mixed = attend(attention, qkv, layer)
        order.append(("attended", layer.layer))
        has_attended[layer.layer].set()
        return mixed

    def copied_noted(layers: CopiedLayers, count: int) -> None:
        if count <= len(last_of_place):
            order.append(("copied", count - 1))
            copied(layers, count)
            assert has_attended[last_of_place[count - 1]].wait(10), "the pass waits for more than its layer"
        else:
            copied(layers, count)

    monkeypatch.setattr(LoadedAttention, "attend", attend_noted)
    monkeypatch.setattr(CopiedLayers, "copied", copied_noted)
    assert tokens(llm, PROMPTS[0]) == expected
    expected_order = list[tuple[str, int]]()
    for place in sorted(last_of_place):
        expected_order += [("copied", place), *(("attended", layer) for layer, of in enumerate(places) if of == place)]
    assert order == expected_order
    assert llm._engine.stats().kv_tiers.tiers["host"].hit_tokens == (48 if architecture == "mistral" else 80)


@pytest.mark.parametrize(
    ("architecture", "changes", "num_pages"), [("qwen3", {}, 5), ("gemma3_text", GEMMA, 5 + 2 * 3)]
)
def test_no_text_is_wrong_when_bits_of_main_memory_have_flipped(
    tmp_path: Path,
    num_layerwise: list[int],
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    changes: dict[str, object],
    num_pages: int,
) -> None:
    save_tiny_model(tmp_path, architecture, **changes)
    monkeypatch.setattr(tier_module, "MOST_MISMATCHES", 1000)
    llm, draw = open_llm(tmp_path, step_depth=1, **WINDOWED), random.Random(2)
    tiers: Any = llm._engine._tiers
    expected, wrong = tokens(llm, PROMPTS[0]), 0
    for _ in range(30):
        evict(llm)
        found = tiers._search.match(llm._engine.inputs.unserved(request(PROMPTS[0])), MISS)
        page = tiers._copies.host.page_memory(tiers._host.page(draw.choice(found.pages).record.key))
        page[draw.randrange(len(page))] ^= 1 << draw.randrange(8)
        wrong += tokens(llm, PROMPTS[0]) != expected
    stats = llm._engine.stats()
    assert (stats.kv_tiers.tiers["host"].mismatches, stats.preemptions, wrong) == (30, 30, 0)
    assert num_layerwise == [num_pages] * 30
