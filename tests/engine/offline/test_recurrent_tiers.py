"""Prompts of models with recurrent layers go on from states in main memory and on a disk, with the same texts."""

import random
from pathlib import Path
from typing import Any

import pytest

from mini_infer_engine import LLM, SamplingParams
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.core.kv_tiers.stats import TierStats
from mini_infer_engine.core.kv_tiers.tiers import KVTiers
from mini_infer_engine.runtime.memory.cpu_host_tier import CpuHostTier
from tests.engine.models.test_models import VARIANTS
from tests.support.tiny_models import save_tiny_model

CHOSEN = ["qwen3-next", "granite-hybrid-moe", "lfm2"]
"""One variant of each kind of recurrence."""
PROMPT = [(place * 37 + 11) % 190 + 5 for place in range(120)]
BOUNDARIES = (16, 17, 47, 48, 49, 95, 96, 97, 112, 120)
"""Where prompts leave the first one: at ends of pages, and of chunks of 48 tokens, and beside them."""
COMMON: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 192,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "kv_cache_memory": 8_000_000,
    "skip_tokenizer_init": True,
}
TIERS: dict[str, Any] = {"kv_host_memory": 40_000_000}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module", params=CHOSEN)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp(request.param)
    architecture, changes = VARIANTS[request.param]
    save_tiny_model(made, architecture, **changes)
    return made


def open_llm(folder: Path, **settings: Any) -> LLM:
    """An engine that loads what a tier has: models so small are computed about as fast as they are copied."""
    llm = LLM(str(folder), **COMMON | settings)
    llm._engine._rate.committed = lambda step, now_s: None  # type: ignore[method-assign]  # a rate that stays
    if isinstance(llm._engine._tiers, KVTiers):
        llm._engine._tiers._search.compute_tokens_per_s = 1.0
    return llm


def tokens(llm: LLM, prompt: list[int]) -> list[int]:
    (output,) = llm.generate([{"prompt_token_ids": prompt}], GREEDY, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def lose_device(llm: LLM) -> None:
    """Writes behind all that the device has, and then has it forget that."""
    while llm._engine.write_behind():
        llm._engine._tiers.wait(1.0)
    llm._engine.scheduler.kv_cache.reset_prefix_cache()


def prompts() -> list[list[int]]:
    return [PROMPT, *([*PROMPT[:end], *(190 - token for token in PROMPT[:9])] for end in BOUNDARIES)]


def tier(llm: LLM, name: str = "host") -> TierStats:
    return llm._engine.stats().kv_tiers.tiers[name]


def test_texts_are_the_same_at_every_boundary_when_states_come_back_from_main_memory(folder: Path) -> None:
    roomy, llm = open_llm(folder), open_llm(folder, **TIERS)
    for prompt in prompts():
        expected = tokens(roomy, prompt)
        roomy._engine.scheduler.kv_cache.reset_prefix_cache()
        assert tokens(llm, prompt) == expected
        lose_device(llm)
    stats = tier(llm)
    assert stats.hit_tokens > 5 * 48
    assert (stats.mismatches, stats.errors) == (0, 0)
    assert stats.blocks * 16 < stats.used_bytes  # states are in the bytes, and are no blocks
    hits = [
        output.cached_tokens_details
        for output in llm.generate([{"prompt_token_ids": one} for one in prompts()[1:]], GREEDY, use_tqdm=False)
    ]
    assert all(one is not None and one.host + one.device > 0 for one in hits[4:])


def test_state_alone_is_loaded_when_the_device_still_has_the_pages(folder: Path) -> None:
    llm = open_llm(folder, **TIERS)
    expected = tokens(llm, PROMPT)
    while llm._engine.write_behind():
        llm._engine._tiers.wait(1.0)
    checkpoints = llm._engine.scheduler.kv_cache.state_checkpoints
    assert checkpoints is not None
    checkpoints.clear()
    loaded = tier(llm).loaded_bytes
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], GREEDY, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == expected
    assert output.num_cached_tokens == 112
    assert output.cached_tokens_details is not None
    assert output.cached_tokens_details.device == 112
    host = llm._engine._tiers._copies.host  # type: ignore[union-attr]  # it has tiers
    assert tier(llm).loaded_bytes - loaded == host.pages_per_state * host.page_bytes


def test_prompt_resumes_from_the_disk_when_the_engine_was_started_anew(folder: Path, tmp_path: Path) -> None:
    disk = {"kv_disk_path": str(tmp_path), "kv_disk_size": "400MB"}
    llm = open_llm(folder, **TIERS, **disk)
    expected = tokens(llm, PROMPT)
    lose_device(llm)
    assert tier(llm, "disk").blocks > 0
    llm._engine._tiers._copies.disk._folder.release()  # type: ignore[union-attr]  # as the end of the process does
    again = open_llm(folder, **TIERS, **disk)
    again._engine._tiers._copies.disk.join_recovery()  # type: ignore[union-attr]  # it has a disk
    assert tokens(again, PROMPT) == expected
    stats = tier(again, "disk")
    assert stats.hit_tokens == 112
    assert (stats.mismatches, stats.errors) == (0, 0)
    again._engine._tiers._copies.disk._folder.release()  # type: ignore[union-attr]
    other = open_llm(folder, **TIERS, **disk, dtype="bfloat16")
    other._engine._tiers._copies.disk.join_recovery()  # type: ignore[union-attr]
    tokens(other, PROMPT)
    assert tier(other, "disk").hit_tokens == 0, "a state of another dtype was hit"


def test_prompt_is_computed_when_a_kill_has_left_a_state_without_its_last_part(folder: Path, tmp_path: Path) -> None:
    disk = {"kv_disk_path": str(tmp_path), "kv_disk_size": "400MB"}
    llm = open_llm(folder, **TIERS, **disk)
    expected = tokens(llm, PROMPT)
    lose_device(llm)
    tiers: Any = llm._engine._tiers
    store, by_state = tiers._copies.disk, dict[bytes, int]()
    for key, page in tiers._disk._pages.items():
        if page.record.part_key:
            by_state[key.partition(b"state")[0]] = page.location  # the parts are written one after another
    assert by_state
    store._folder.release()
    for location in by_state.values():
        number, offset = store.layout.place(location)
        with store._folder.segment(number).open("r+b") as file:
            file.seek(offset)
            file.write(bytes(store.layout.header_bytes))  # a header is written after its page
    again = open_llm(folder, **TIERS, **disk)
    again._engine._tiers._copies.disk.join_recovery()  # type: ignore[union-attr]  # it has a disk
    assert tokens(again, PROMPT) == expected
    stats = tier(again, "disk")
    assert (stats.hit_tokens, stats.mismatches, stats.errors) == (0, 0, 0)
    assert stats.blocks > 0


def test_every_flip_of_a_bit_of_a_state_is_found_and_the_prompt_is_computed(folder: Path) -> None:
    draw, llm = random.Random(3), open_llm(folder, **TIERS)
    expected = tokens(llm, PROMPT)
    for flips in range(1, 13):
        lose_device(llm)
        tiers = llm._engine._tiers
        assert isinstance(tiers, KVTiers)
        host = tiers._copies.host
        assert isinstance(host, CpuHostTier)
        assert host._states is not None
        records = {page: tiers._host.record(page) for page in range(host.num_pages)}
        parts = [page for page, record in records.items() if record is not None and record.part_key]
        assert len(parts) % host.pages_per_state == 0
        num_words = min(host._states.shape[1] % host.words.shape[1] or host.words.shape[1], host._states.shape[1])
        for page in parts:  # in any part, the last and shortest one included
            host.words[page, draw.randrange(num_words)] ^= 1 << draw.randrange(63)
        hits = tier(llm).hit_tokens
        assert tokens(llm, PROMPT) == expected
        assert tier(llm).mismatches == flips
        assert tier(llm).hit_tokens == hits
        tiers._host_tier.is_on = True  # that it is turned off after three is another test's


def test_start_is_refused_when_main_memory_has_no_room_for_a_state(folder: Path) -> None:
    page_bytes = open_llm(folder)._engine._runner.pool.spec.page_bytes  # type: ignore[attr-defined]  # it has a model
    with pytest.raises(ModelError, match=r"kv_host_memory = .*recurrent state"):
        open_llm(folder, kv_host_memory=page_bytes)
