"""Conversations whose blocks were in main memory or on a disk go on with the same texts, on the demo model."""

import errno
from pathlib import Path

import pytest

from mini_infer_engine import LLM, RequestOutput, SamplingParams
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.kv_disk.disk_folder import DiskFolder
from tests.support.tiny_models import DEEPSEEK, GEMMA4_INPUTS, save_tiny_model

TOPICS = [
    f"The {number}th list is sorted, and then its names are joined with a comma, so that" * 3 for number in range(12)
]
WINDOWS: dict[str, object] = {
    "num_hidden_layers": 4,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
POOL = 3_000_000
"""Bytes of which a part of the conversations fills all."""


def open_llm(**settings: object) -> LLM:
    return LLM("demo", device="cpu", max_model_len=256, max_num_seqs=2, **settings)


def use_tiers(llm: LLM) -> None:
    """Has an engine load what a tier has: models so small are computed about as fast as they are copied."""
    llm._engine._rate.committed = lambda step, now_s: None  # type: ignore[method-assign]  # a rate that stays
    llm._engine._tiers._search.compute_tokens_per_s = 1.0  # type: ignore[union-attr]  # it has tiers


def write_behind(llm: LLM) -> None:
    while llm._engine.write_behind():
        llm._engine._tiers.wait(1.0)


def rounds(llm: LLM, *, computes_slowly: bool = False) -> list[list[RequestOutput]]:
    """Continues every conversation twice, each with its own text so far."""
    if computes_slowly:
        use_tiers(llm)
    made, prompts = [], list(TOPICS)
    sampling_params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for _ in range(3):
        made.append(llm.generate(prompts, sampling_params, use_tqdm=False))
        prompts = [one.prompt + one.outputs[0].text for one in made[-1] if one.prompt is not None]
        write_behind(llm)
    return made


def texts(made: list[list[RequestOutput]]) -> list[list[str]]:
    return [[output.outputs[0].text for output in one] for one in made]


def test_texts_are_the_same_when_blocks_come_back_from_main_memory_and_a_disk(tmp_path: Path) -> None:
    expected = texts(rounds(open_llm(kv_cache_memory=200_000_000)))
    disk = {"kv_disk_path": str(tmp_path), "kv_disk_size": "200MB"}
    llm = open_llm(kv_cache_memory=POOL, kv_host_memory="100MB", **disk)
    made = rounds(llm, computes_slowly=True)
    assert texts(made) == expected
    stats = llm._engine.stats().kv_tiers.tiers
    assert stats["host"].hit_tokens > 200
    assert stats["disk"].stored_bytes > 0
    assert sum(tier.mismatches + tier.errors for tier in stats.values()) == 0
    details = [output.cached_tokens_details for output in made[-1]]
    assert any(one is not None and one.host for one in details)
    assert all(one is not None and one.device + one.host + one.disk == output.num_cached_tokens
               for one, output in zip(details, made[-1], strict=True))  # fmt: skip

    llm._engine._tiers._copies.disk._folder.release()  # type: ignore[union-attr]  # as the end of the process does
    again = open_llm(kv_cache_memory=POOL, kv_host_memory="100MB", **disk)
    again._engine._tiers._copies.disk.join_recovery()  # type: ignore[union-attr]  # it has a disk
    assert texts(rounds(again, computes_slowly=True)) == expected
    assert again._engine.stats().kv_tiers.tiers["disk"].hit_tokens > 200


def test_serving_goes_on_without_the_disk_when_it_is_full_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    llm = open_llm(kv_cache_memory=POOL, kv_host_memory="100MB", kv_disk_path=str(tmp_path), kv_disk_size="200MB")
    assert llm.generate(TOPICS[:1], SamplingParams(max_tokens=1), use_tqdm=False)
    write_behind(llm)
    tiers = llm._engine.stats().kv_tiers.tiers
    assert (tiers["host"].is_on, tiers["host"].errors) == (True, 0)
    assert (tiers["disk"].is_on, tiers["disk"].errors, tiers["disk"].capacity_bytes) == (False, 1, 0)
    monkeypatch.undo()
    folder = DiskFolder(tmp_path, "another")
    assert folder.path.name == "engine-0", "it is locked no more"
    folder.release()


@pytest.mark.parametrize(
    ("architecture", "changes", "settings"),
    [
        ("qwen3", {}, {"kv_cache_dtype": "int8"}),
        ("deepseek_v2", DEEPSEEK, {}),
        ("gemma3_text", {"head_dim": 16, "sliding_window": 11}, {}),
        ("gemma3_text", WINDOWS | {"head_dim": 16}, {}),
        ("gemma3_text", WINDOWS | {"head_dim": 16}, {"kv_cache_dtype": "int8", "step_depth": 1}),
        ("gemma4_text", GEMMA4_INPUTS | {"head_dim": 16, "global_head_dim": 32}, {}),
    ],
)
def test_tokens_are_the_same_when_pages_of_any_form_come_back(
    tmp_path: Path, architecture: str, changes: dict[str, object], settings: dict[str, object]
) -> None:
    save_tiny_model(tmp_path, architecture, **changes)
    common = {"device": "cpu", "max_model_len": 96, "max_num_seqs": 2, "skip_tokenizer_init": True} | settings
    prompts = [{"prompt_token_ids": [(place * 7 + shift * 13) % 190 + 5 for place in range(70)]} for shift in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)

    def tokens(llm: LLM) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    roomy = LLM(str(tmp_path), kv_cache_memory=4_000_000, **common)
    expected = tokens(roomy)
    page_bytes = roomy._engine._runner.pool.spec.page_bytes  # type: ignore[attr-defined]  # it has a model
    llm = LLM(str(tmp_path), kv_cache_memory=90 * page_bytes, kv_host_memory=200 * page_bytes, **common)
    use_tiers(llm)
    for _ in range(3):
        assert tokens(llm) == expected
        write_behind(llm)
        llm._engine.scheduler.kv_cache.reset_prefix_cache()
    stats = llm._engine.stats().kv_tiers.tiers["host"]
    assert stats.hit_tokens > 100
    assert stats.prefetch_used_tokens > 0, "prompts that wait in line are read ahead"
    assert (stats.mismatches, stats.errors) == (0, 0)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("qwen3", {"head_dim": 32}),
        ("gemma3_text", {"head_dim": 64, "sliding_window": 11}),
        ("gemma4_text", GEMMA4_INPUTS | {"head_dim": 32, "global_head_dim": 64}),
    ],
)
def test_prompts_go_on_when_pages_come_back_from_four_bits(
    tmp_path: Path, architecture: str, changes: dict[str, object]
) -> None:
    save_tiny_model(tmp_path, architecture, **changes)
    common = {"device": "cpu", "max_model_len": 96, "max_num_seqs": 2, "skip_tokenizer_init": True}
    prompts = [{"prompt_token_ids": [(place * 7 + shift * 13) % 190 + 5 for place in range(70)]} for shift in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, detokenize=False)

    def logprobs(llm: LLM) -> list[float]:
        made = llm.generate(prompts, params, use_tqdm=False)
        return [next(iter(output.outputs[0].logprobs[0].values())).logprob for output in made]  # type: ignore[index]  # there are some

    expected = logprobs(LLM(str(tmp_path), kv_cache_memory=4_000_000, **common))
    page_bytes = LLM(str(tmp_path), kv_cache_memory=4_000_000, **common)._engine._runner.pool.spec.page_bytes  # type: ignore[attr-defined]  # it has a model
    tier = {"kv_host_memory": 30 * page_bytes, "kv_tier_dtype": "int4"}
    llm = LLM(str(tmp_path), kv_cache_memory=15 * page_bytes, **tier, **common)
    use_tiers(llm)
    for _ in range(3):
        made = logprobs(llm)
        write_behind(llm)
        differences = [abs(one - other) for one, other in zip(made, expected, strict=True)]
        assert sum(differences) / len(differences) < 0.25
    stats = llm._engine.stats().kv_tiers.tiers["host"]
    assert stats.hit_tokens >= 64
    assert (stats.mismatches, stats.errors) == (0, 0)
    assert stats.capacity_bytes // llm._engine._tiers._copies.host.page_bytes > 90  # type: ignore[union-attr]  # of fp32, 1/7


def test_blocks_on_a_disk_are_no_hits_when_their_format_is_another(tmp_path: Path) -> None:
    def blocks(**settings: object) -> int:
        sizes = {"kv_cache_memory": POOL, "kv_host_memory": "20MB", "kv_disk_size": "200MB"}
        llm = open_llm(kv_disk_path=str(tmp_path), **sizes, **settings)
        disk = llm._engine._tiers._copies.disk  # type: ignore[union-attr]  # it has a disk
        disk.join_recovery()  # type: ignore[union-attr]
        llm._engine.write_behind()  # takes in what was recovered: later some blocks may have been written already
        found = llm._engine.stats().kv_tiers.tiers["disk"].blocks
        llm.generate(TOPICS[:6], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        write_behind(llm)
        disk._folder.release()  # type: ignore[union-attr]
        return found

    assert blocks() == 0
    assert blocks() > 0
    assert blocks(kv_tier_dtype="int4") == 0
    assert blocks(kv_tier_dtype="int4") > 0


@pytest.mark.parametrize(
    ("architecture", "changes", "settings", "named"),
    [
        ("qwen3", {"head_dim": 32}, {"kv_cache_dtype": "int8"}, "--kv-cache-dtype"),
        ("qwen3", {"head_dim": 16}, {}, "--kv-tier-dtype"),
        ("deepseek_v2", DEEPSEEK, {}, "--kv-tier-dtype"),
    ],
)
def test_four_bits_are_refused_when_pages_are_not_of_their_kind(
    tmp_path: Path, architecture: str, changes: dict[str, object], settings: dict[str, object], named: str
) -> None:
    save_tiny_model(tmp_path, architecture, **changes)
    tier = {"kv_host_memory": 10**6, "kv_tier_dtype": "int4"}
    with pytest.raises(ModelError, match=named):
        LLM(str(tmp_path), device="cpu", kv_cache_memory=4_000_000, skip_tokenizer_init=True, **tier, **settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kv_tier_dtype": "int4"}, "--kv-tier-dtype"),
        ({"kv_disk_path": "/tmp"}, "--kv-disk-size"),
        ({"kv_disk_path": "/tmp", "kv_disk_size": 10**9}, "--kv-host-memory"),
        ({"kv_host_memory": 10**9, "enable_prefix_caching": False}, "--no-enable-prefix-caching"),
        ({"kv_host_memory": "99TB", "kv_cache_memory": POOL}, "kv_host_memory = 99,000,000,000,000"),
        ({"kv_host_memory": 100, "kv_cache_memory": POOL}, "kv_host_memory = 100"),
    ],
)
def test_llm_is_refused_when_options_of_tiers_do_not_go_together(settings: dict[str, object], named: str) -> None:
    with pytest.raises((ModelError, ValueError), match=named):
        open_llm(**settings)


def test_llm_is_refused_when_the_disk_tier_cannot_be_opened(tmp_path: Path) -> None:
    sizes = {"kv_cache_memory": POOL, "kv_host_memory": "10MB"}
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ValueError, match="--kv-disk-path"):
        open_llm(kv_disk_path=str(tmp_path / "file"), kv_disk_size="1GB", **sizes)
    with pytest.raises(ValueError, match="--kv-disk-size"):
        open_llm(kv_disk_path=str(tmp_path), kv_disk_size=1000, **sizes)
