"""Batches in, tokens out: what the scheduler relies on."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.batch import Batch, Row, continued_slots
from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.runtime.cpu.executor import TorchExecutor
from mini_infer_engine.runtime.executor import executor_class
from mini_infer_engine.runtime.memory.page_count import fit_context
from mini_infer_engine.runtime.model_runner import ModelRunner, load_runner
from tests.support.tiny_models import GREEDY, PageDealer, chunk, sampled, save_tiny_model, tiny_runner

PROMPT = [(position * 31 + 3) % 190 + 5 for position in range(21)]
WARM = SamplingParams(temperature=1.3, top_p=0.95)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("qwen3")
    return directory, save_tiny_model(directory, "qwen3")


@pytest.fixture
def runner(model: tuple[Path, Any]) -> ModelRunner:
    return tiny_runner(model[0])


def decode(slot: int, start: int, table: list[int], index: int, sampling: SamplingParams = GREEDY) -> Row:
    return Row(slot, start, 1, None, table, sampling, noise_seed=slot + 40, output_index=index)


def generate(runner: ModelRunner, slot: int, sampling: SamplingParams, length: int, seed: int) -> list[int]:
    """One sequence alone, prefill in one pass."""
    table = PageDealer(runner).table(len(PROMPT) + length)
    row = chunk(slot, PROMPT, 0, len(PROMPT), table, sampling=sampling, noise_seed=seed)
    tokens = sampled(runner.collect(runner.launch(Batch([row], 0))))
    for index in range(1, length):
        row = Row(slot, len(PROMPT) + index - 1, 1, None, table, sampling, noise_seed=seed, output_index=index)
        tokens += sampled(runner.collect(runner.launch(Batch([row], 1))))
    return [token for token in tokens if token is not None]


def test_greedy_text_equals_transformers(model: tuple[Path, Any], runner: ModelRunner) -> None:
    expected = model[1].generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=80, min_new_tokens=80, eos_token_id=None
    )[0, len(PROMPT) :]
    assert generate(runner, 3, GREEDY, 80, 0) == expected.tolist()


def test_sampled_text_is_equal_when_batches_and_chunks_differ(runner: ModelRunner) -> None:
    alone = [generate(runner, slot, WARM, 6, slot + 40) for slot in (5, 2)]
    assert alone[0] != alone[1]
    dealer = PageDealer(runner)
    tables = [dealer.table(40), dealer.table(40)]
    early = chunk(5, PROMPT, 0, 21, tables[0], sampling=WARM, noise_seed=45)
    late = chunk(2, PROMPT, 0, 8, tables[1])
    texts: list[list[int | None]] = [sampled(runner.collect(runner.launch(Batch([early, late], 0))))]
    assert texts[0][1] is None
    late = chunk(2, PROMPT, 8, 13, tables[1], sampling=WARM, noise_seed=42)
    texts.append(sampled(runner.collect(runner.launch(Batch([decode(5, 21, tables[0], 1, WARM), late], 1)))))
    for step in range(4):
        rows = [decode(2, 21 + step, tables[1], step + 1, WARM), decode(5, 22 + step, tables[0], step + 2, WARM)]
        texts.append(sampled(runner.collect(runner.launch(Batch(rows, 2))))[::-1])
    assert [text[0] for text in texts] == alone[0]
    assert [text[1] for text in texts[1:]] == alone[1][:5]


def test_a_new_sequence_is_unaffected_by_the_previous_one_in_its_slot(runner: ModelRunner) -> None:
    """The worst case for anything that is kept from pass to pass: same slot, same pages, and just the next position."""
    other = [token + 1 for token in PROMPT] + [9]
    table = [5, 3]
    expected = []
    for slot in (1, 0):
        if slot == 0:
            sampled(runner.collect(runner.launch(Batch([chunk(0, PROMPT, 0, 21, table, sampling=GREEDY)], 0))))
            sampled(runner.collect(runner.launch(Batch([decode(0, 21, table, 1)], 1))))
        first = sampled(runner.collect(runner.launch(Batch([chunk(slot, other, 0, 22, table, sampling=GREEDY)], 0))))
        expected.append(first + sampled(runner.collect(runner.launch(Batch([decode(slot, 22, table, 1)], 1)))))
    assert expected[0] == expected[1]


@pytest.mark.parametrize("most_bytes", [0, 10**9])
def test_sequences_decode_as_alone_when_others_come_and_go(
    most_bytes: int, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mini_infer_engine.runtime.attention.running_copy.MOST_BYTES", most_bytes)
    alone = [generate(runner, slot, WARM, 60, slot + 40) for slot in range(4)]
    dealer = PageDealer(runner)
    tables = [dealer.table(90) for _ in range(4)]
    texts: list[list[int | None]] = [[], [], [], []]
    for step in range(70):
        # Each joins three passes after the one before, and the second sits some passes out.
        present = [slot for slot in range(4) if 3 * slot <= step and len(texts[slot]) < 60]
        present = [slot for slot in present if slot != 1 or step % 7 != 5]
        decodes = [slot for slot in present if texts[slot]]
        fresh = [slot for slot in present if not texts[slot]]
        rows = [decode(slot, 20 + len(texts[slot]), tables[slot], len(texts[slot]), WARM) for slot in decodes]
        rows += [chunk(slot, PROMPT, 0, 21, tables[slot], sampling=WARM, noise_seed=slot + 40) for slot in fresh]
        if rows:
            tokens = sampled(runner.collect(runner.launch(Batch(rows, len(decodes)))))
            for slot, token in zip(decodes + fresh, tokens, strict=True):
                texts[slot].append(token)
    assert texts[0] == alone[0]
    for text, expected in zip(texts, alone, strict=True):
        assert len(text) > 50
        assert text == expected[: len(text)]


def test_a_pass_mixes_tokens_from_host_and_device(runner: ModelRunner) -> None:
    first, second = generate(runner, 0, GREEDY, 2, 0)
    dealer = PageDealer(runner)
    tables = [dealer.table(30), dealer.table(30)]
    prompts = [chunk(slot, PROMPT, 0, 21, tables[slot], sampling=GREEDY) for slot in (0, 1)]
    assert sampled(runner.collect(runner.launch(Batch(prompts, 0)))) == [first, first]
    known = Row(0, 21, 1, [first], tables[0], GREEDY)
    assert sampled(runner.collect(runner.launch(Batch([known, decode(1, 21, tables[1], 1)], 2)))) == [second, second]


def test_a_pass_returns_none_when_it_samples_nothing(runner: ModelRunner) -> None:
    rows = [chunk(0, PROMPT, 0, 10, [0]), chunk(1, PROMPT, 0, 5, [1])]
    assert sampled(runner.collect(runner.launch(Batch(rows, 0)))) == [None, None]


def test_the_kv_pool_is_as_large_as_kv_cache_memory_allows(model: tuple[Path, Any]) -> None:
    runner = tiny_runner(model[0], kv_cache_memory=1_000_000, max_model_len=300)
    assert runner.pool.pages.nbytes <= 1_000_000 < runner.pool.pages.nbytes + runner.pool.spec.page_bytes
    assert runner.max_model_len == 300
    assert tiny_runner(model[0]).max_model_len == 512
    assert tiny_runner(model[0], kv_cache_memory=runner.pool.spec.page_bytes * 5).max_model_len == 4 * 16


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_cache_memory": 10**16}, ["kv_cache_memory", "10,000,000,000,000,000", "available"]),
        ({"kv_cache_memory": 1000}, ["1,000", "two pages"]),
        ({"max_model_len": 513}, ["max_model_len = 513", "512 tokens", "max_position_embeddings"]),
        ({"max_model_len": 512, "kv_cache_memory": 300_000}, ["max_model_len = 512", "kv_cache_memory"]),
        ({"page_size": 24}, ["page_size = 24", "16"]),
    ],
)
def test_a_runner_refuses_settings_that_cannot_work(
    settings: dict[str, Any], words: list[str], model: tuple[Path, Any]
) -> None:
    with pytest.raises(ModelError) as raised:
        tiny_runner(model[0], **settings)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_cuda_is_refused_when_there_is_no_gpu(model: tuple[Path, Any]) -> None:
    with pytest.raises(ModelError, match="torch sees no GPU"):
        tiny_runner(model[0], device="cuda")


def test_the_context_is_cut_to_the_pool_only_when_it_was_not_configured() -> None:
    assert fit_context(None, 4096, 1000) == 1000
    assert fit_context(None, 4096, 10_000) == 4096
    assert fit_context(100, 4096, 10_000) == 100


def test_a_runner_is_loaded_from_settings_alone(model: tuple[Path, Any]) -> None:
    runner = load_runner(EngineSettings(model=str(model[0]), device="cpu", kv_cache_memory=1_000_000))
    assert runner.worker.dtype == torch.float32
    assert runner.config.eos_token_ids == (2,)


def test_an_attention_backend_is_refused_with_the_reason_when_it_cannot_run() -> None:
    for name in ("flash", "triton"):
        with pytest.raises(ModelError, match=f"attention_backend = '{name}'"):
            executor_class(EngineSettings(model="x", attention_backend=name), "cpu")
    assert executor_class(EngineSettings(model="x"), "cpu") is TorchExecutor
    assert executor_class(EngineSettings(model="x", attention_backend="torch"), "cuda") is TorchExecutor


def test_a_token_known_to_the_host_is_used_in_chunks_and_decode_rows(runner: ModelRunner) -> None:
    table = PageDealer(runner).table(30)
    expected = generate(runner, 0, GREEDY, 3, 0)
    sampled(runner.collect(runner.launch(Batch([chunk(1, PROMPT, 0, 21, table)], 0))))
    runner.executor.last_tokens[1] = (expected[0] + 1) % 199  # what the slot's last sequence left behind
    for num_decodes in (0, 1):
        row = chunk(1, [*PROMPT, expected[0]], 21, 1, table, sampling=GREEDY, output_index=1)
        assert sampled(runner.collect(runner.launch(Batch([row], num_decodes)))) == expected[1:2]


def test_passes_reading_device_tokens_refuse_rows_with_host_tokens() -> None:
    rows = [decode(3, 21, [0, 1], 1), decode(1, 5, [2], 1)]
    assert continued_slots(rows) == [3, 1]
    with pytest.raises(AssertionError, match="count 1"):
        continued_slots([*rows, chunk(2, PROMPT, 20, 1, [3, 4], sampling=GREEDY)])
