"""The contract of `Runner`, which every implementation keeps: the same cases for each line of `SUBJECTS`.

Nothing here knows what a runner computes, only that it is a function of the tokens before, and of the row's seed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.batch import Batch, PageCopy, Row, Runner, TokenMasks, Transfers
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.grammars.matcher import mask_of
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.distributed.parallel_runner import ParallelRunner, load_parallel
from mini_infer_engine.dry.scripted_runner import ScriptedRunner
from mini_infer_engine.dry.vocabulary import EOS_TOKEN_IDS, VOCAB_SIZE
from mini_infer_engine.runtime.model_runner import load_runner
from tests.gpu.device import GPU_ONLY
from tests.support.fake_runner import EOS, VOCABULARY, FakeRunner
from tests.support.tiny_models import DEEPSEEK, sampled, save_tiny_model

GREEDY = SamplingParams(temperature=0.0)
MAX_MODEL_LEN = 160
PROMPT_LENGTH = 37
NUM_SLOTS = 8
COMMON: dict[str, Any] = {"dtype": "float32", "max_num_seqs": NUM_SLOTS, "max_model_len": 512}


@dataclass(frozen=True)
class Subject:
    """A runner and what a caller must know of its model."""

    runner: Runner
    vocabulary: int
    eos: tuple[int, ...]
    must_sample: bool = False
    """True if each pass that waits for masks must get them."""

    def prompt(self, seed: int = 0, length: int = PROMPT_LENGTH) -> list[int]:
        return [(position * 7 + seed * 3 + 1) % (min(self.vocabulary, 256) - 4) + 4 for position in range(length)]

    def pages(self, number: int) -> list[int]:
        """The page table of one of a few sequences, in an order that is not the positions'."""
        count = -(-MAX_MODEL_LEN // self.runner.page_size)
        first = number * count
        return list(range(first, first + count))[::-1]

    def run(self, rows: Sequence[Row], num_decodes: int = 0, copies: Sequence[PageCopy] = ()) -> list[int | None]:
        return sampled(
            self.runner.collect(self.runner.launch(Batch(list(rows), num_decodes, Transfers(copies=list(copies)))))
        )


def fake(folder: Path) -> Subject:
    return Subject(FakeRunner(200, 16, NUM_SLOTS), VOCABULARY, (EOS,), must_sample=True)


def scripted(folder: Path) -> Subject:
    return Subject(ScriptedRunner(200), VOCAB_SIZE, EOS_TOKEN_IDS)


def torch_on_cpu(folder: Path) -> Subject:
    return tiny(folder, device="cpu", kv_cache_memory=16_000_000)


def tensor_parallel_on_cpu(folder: Path) -> Subject:
    return group(folder, tensor_parallel_size=2)


def pipeline_on_cpu(folder: Path) -> Subject:
    return group(folder, pipeline_parallel_size=2)


def torch_on_gpu(folder: Path) -> Subject:
    return tiny(folder, device="cuda", attention_backend="torch", kv_cache_memory=1 << 28)


def graphs_on_gpu(folder: Path) -> Subject:
    return tiny(folder, device="cuda", kv_cache_memory=1 << 28)


def eager_on_gpu(folder: Path) -> Subject:
    return tiny(folder, device="cuda", enforce_eager=True, kv_cache_memory=1 << 28)


def latent_on_cpu(folder: Path) -> Subject:
    return latent(folder, device="cpu", kv_cache_memory=16_000_000)


def latent_on_gpu(folder: Path) -> Subject:
    return latent(folder, device="cuda", kv_cache_memory=1 << 28)


def latent(folder: Path, **settings: object) -> Subject:
    save_tiny_model(folder, "deepseek_v2", **DEEPSEEK)
    return load_tiny(folder, **settings)


def tiny(folder: Path, **settings: object) -> Subject:
    save_tiny_model(folder, "qwen3", head_dim=64)
    return load_tiny(folder, **settings)


def group(folder: Path, **settings: Any) -> Subject:
    """Ranks in processes of their own, which end with the module."""
    save_tiny_model(folder, "qwen3", head_dim=64)
    runner = load_parallel(
        EngineSettings(model=str(folder), device="cpu", kv_cache_memory=16_000_000, **(COMMON | settings))
    )
    eos_token_ids, is_pipeline = runner.config.eos_token_ids, runner.settings.pipeline_parallel_size > 1
    return Subject(runner, runner.config.vocab_size, eos_token_ids, must_sample=is_pipeline)


def load_tiny(folder: Path, **settings: Any) -> Subject:
    runner = load_runner(EngineSettings(model=str(folder), **(COMMON | settings)))
    return Subject(runner, runner.config.vocab_size, runner.config.eos_token_ids)


SUBJECTS = [
    fake,
    scripted,
    torch_on_cpu,
    latent_on_cpu,
    tensor_parallel_on_cpu,
    pipeline_on_cpu,
    *(pytest.param(make, marks=GPU_ONLY) for make in (torch_on_gpu, graphs_on_gpu, eager_on_gpu, latent_on_gpu)),
]


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    make: Callable[[Path], Subject] = request.param
    made = make(tmp_path_factory.mktemp("model"))
    yield made
    if isinstance(made.runner, ParallelRunner):
        made.runner.ranks.close()


def chunk(
    slot: int,
    tokens: list[int],
    start: int,
    end: int,
    table: list[int],
    sampling: SamplingParams | None,
    index: int = 0,
) -> Row:
    return Row(slot, start, end - start, tokens[start:end], table, sampling, noise_seed=5, output_index=index)


def decode(slot: int, start: int, table: list[int], index: int, sampling: SamplingParams = GREEDY) -> Row:
    return Row(slot, start, 1, None, table, sampling, noise_seed=5, output_index=index)


def generated(subject: Subject, slot: int, prompt: list[int], count: int, number: int = 0) -> list[int]:
    """One prompt in one chunk, then `count` - 1 decodes."""
    table, length = subject.pages(number), len(prompt)
    tokens = subject.run([chunk(slot, prompt, 0, length, table, GREEDY)])
    for index in range(1, count):
        tokens += subject.run([decode(slot, length + index - 1, table, index)], 1)
    return [token for token in tokens if token is not None]


def test_page_size_is_a_multiple_of_a_block(subject: Subject) -> None:
    assert subject.runner.page_size % 16 == 0
    assert subject.runner.num_pages * subject.runner.page_size >= 2 * MAX_MODEL_LEN


def test_a_row_has_no_token_when_nothing_is_sampled(subject: Subject) -> None:
    prompts = [subject.prompt(seed) for seed in range(3)]
    rows = [
        chunk(0, prompts[0], 0, PROMPT_LENGTH, subject.pages(0), GREEDY),
        chunk(1, prompts[1], 0, 20, subject.pages(1), None),
        chunk(2, prompts[2], 0, PROMPT_LENGTH, subject.pages(2), GREEDY),
    ]
    first, none, third = subject.run(rows)
    assert none is None
    for token in (first, third):
        assert token is not None
        assert token >= 0


def test_tokens_are_equal_when_chunks_slots_and_pages_differ(subject: Subject) -> None:
    prompt = subject.prompt()
    whole = generated(subject, 0, prompt, 4)
    table = subject.pages(1)
    assert subject.run([chunk(3, prompt, 0, 16, table, None)]) == [None]
    assert subject.run([chunk(3, prompt, 16, 30, table, None)]) == [None]
    pieces = subject.run([chunk(3, prompt, 30, PROMPT_LENGTH, table, GREEDY)])
    for index in range(1, 4):
        pieces += subject.run([decode(3, PROMPT_LENGTH + index - 1, table, index)], 1)
    assert pieces == whole


def test_decoding_goes_on_when_a_known_token_comes_as_a_chunk_of_one(subject: Subject) -> None:
    prompt = subject.prompt()
    whole = generated(subject, 0, prompt, 3)
    known = prompt + whole[:1]
    table = subject.pages(1)
    subject.run([chunk(1, known, 0, PROMPT_LENGTH, table, None)])
    after = subject.run([chunk(1, known, PROMPT_LENGTH, PROMPT_LENGTH + 1, table, GREEDY, index=1)])
    after += subject.run([decode(1, PROMPT_LENGTH + 1, table, 2)], 1)
    assert after == whole[1:]


def test_a_decode_continues_from_the_device_when_two_passes_are_in_flight(subject: Subject) -> None:
    prompt, table = subject.prompt(1), subject.pages(0)
    expected = generated(subject, 0, prompt, 3)
    runner = subject.runner
    handles = [
        runner.launch(Batch([chunk(0, prompt, 0, PROMPT_LENGTH, table, GREEDY)], 0)),
        runner.launch(Batch([decode(0, PROMPT_LENGTH, table, 1)], 1)),
    ]
    tokens = sampled(runner.collect(handles[0]))
    handles.append(runner.launch(Batch([decode(0, PROMPT_LENGTH + 1, table, 2)], 1)))
    tokens += sampled(runner.collect(handles[1])) + sampled(runner.collect(handles[2]))
    assert tokens == expected


def test_tokens_are_equal_when_decodes_and_chunks_share_a_pass(subject: Subject) -> None:
    first, second = subject.prompt(0), subject.prompt(1)
    expected = generated(subject, 0, first, 2)[1], generated(subject, 0, second, 1)[0]
    tables = subject.pages(0), subject.pages(1)
    subject.run([chunk(0, first, 0, PROMPT_LENGTH, tables[0], GREEDY)])
    rows = [decode(0, PROMPT_LENGTH, tables[0], 1), chunk(1, second, 0, PROMPT_LENGTH, tables[1], GREEDY)]
    assert tuple(subject.run(rows, 1)) == expected


def test_tokens_are_equal_when_a_prefix_was_copied(subject: Subject) -> None:
    prompt = subject.prompt(2, 15)
    expected = generated(subject, 0, prompt, 1)
    source, target = subject.pages(0)[0], subject.pages(1)[0]
    rest = chunk(1, prompt, 11, 15, [target], GREEDY)
    assert subject.run([rest], copies=[PageCopy(source, target, 11)]) == expected


def test_no_token_is_sampled_when_it_is_suppressed(subject: Subject) -> None:
    prompt, table = subject.prompt(), subject.pages(0)
    params = SamplingParams(temperature=0.0, min_tokens=1, stop_token_ids=[0])
    suppressed: list[int] = []
    for _ in range(20):
        row = chunk(0, prompt, 0, PROMPT_LENGTH, table, params)
        row.suppressed_token_ids = tuple(suppressed)
        [token] = subject.run([row])
        assert token is not None
        assert token not in suppressed
        suppressed.append(token)


def masks_of(subject: Subject, allowed: dict[int, list[int]]) -> TokenMasks:
    """By row, the tokens that it may choose."""
    bits = np.stack([mask_of(tokens, subject.vocabulary) for tokens in allowed.values()])
    return TokenMasks(list(allowed), bits)


def test_only_allowed_tokens_are_chosen_when_a_pass_waits_for_masks(subject: Subject) -> None:
    """Beside rows without masks, in decode rows and chunks, and the next pass goes on from what was chosen."""
    runner, prompts = subject.runner, [subject.prompt(seed) for seed in range(3)]
    tables = [subject.pages(number) for number in range(3)]
    free = generated(subject, 0, prompts[0], 3, number=0)
    rows = [chunk(slot, prompts[slot], 0, PROMPT_LENGTH, tables[slot], GREEDY) for slot in range(2)]
    rows.append(chunk(2, prompts[2], 0, 20, tables[2], None))
    handle = runner.launch(Batch(rows, 0, waits_for_masks=True))
    runner.sample(handle, masks_of(subject, {1: [7, 9]}))
    first = sampled(runner.collect(handle))
    assert first[0] == free[0]
    assert first[1] in (7, 9)
    assert first[2] is None

    rows = [decode(slot, PROMPT_LENGTH, tables[slot], 1) for slot in range(2)]
    rows.append(chunk(2, prompts[2], 20, PROMPT_LENGTH, tables[2], GREEDY))
    handle = runner.launch(Batch(rows, 2, waits_for_masks=True))
    runner.sample(handle, masks_of(subject, {1: [11], 2: [12]}))
    second = sampled(runner.collect(handle))
    assert second == [free[1], 11, 12]

    rows = [decode(slot, PROMPT_LENGTH + 1, tables[slot], 2) for slot in range(2)]
    rows.append(decode(2, PROMPT_LENGTH, tables[2], 1))
    third = subject.run(rows, 3)
    assert third[0] == free[2]
    again = [*prompts[1], first[1] or 0, 11]
    assert subject.run([chunk(1, again, 0, len(again), tables[1], GREEDY, index=2)]) == [third[1]]


def test_an_allowed_token_is_chosen_when_all_other_filters_apply(subject: Subject) -> None:
    runner, prompt, table = subject.runner, subject.prompt(), subject.pages(0)
    params = SamplingParams(temperature=1.0, top_k=3, top_p=0.9, min_p=0.01, repetition_penalty=1.2, min_tokens=1)
    row = chunk(0, prompt, 0, PROMPT_LENGTH, table, params)
    row.suppressed_token_ids, row.known_token_ids = (5, 6), prompt
    handle = runner.launch(Batch([row], 0, waits_for_masks=True))
    runner.sample(handle, masks_of(subject, {0: [8, 30]}))
    assert sampled(runner.collect(handle))[0] in (8, 30)


def test_later_passes_are_unchanged_when_masks_never_come(subject: Subject) -> None:
    prompt, table = subject.prompt(), subject.pages(0)
    expected = generated(subject, 0, prompt, 2)
    if not subject.must_sample:
        subject.runner.collect(
            subject.runner.launch(Batch([chunk(0, prompt, 0, PROMPT_LENGTH, table, GREEDY)], 0, waits_for_masks=True))
        )
    assert generated(subject, 0, prompt, 2) == expected


EXTREMES: list[dict[str, object]] = [
    {"temperature": 2.0},
    {"temperature": 1e-30},
    {"top_p": 1e-30},
    {"top_k": 1},
    {"top_k": 2**31 - 1},
    {"min_p": 1.0},
    {"repetition_penalty": 1e30},
    {"repetition_penalty": 1e-30},
    {"presence_penalty": -2.0, "frequency_penalty": -2.0},
    {"presence_penalty": 2.0, "frequency_penalty": 2.0, "top_k": 3, "top_p": 0.1, "min_p": 0.9},
    {"seed": 2**63 - 1},
    {"min_tokens": 4, "stop_token_ids": list(range(8))},
    {"min_tokens": 1, "stop_token_ids": list(range(33))},
    {"min_tokens": 1, "stop_token_ids": list(range(39))},
    {"min_tokens": 4, "stop_token_ids": list(range(33)), "repetition_penalty": 1.5, "top_p": 0.5},
    {"min_tokens": 5, "max_tokens": 5, "ignore_eos": True},
    {"max_tokens": None},
]


@pytest.mark.parametrize("depth", [0, 1])
def test_each_request_is_served_or_refused_when_parameters_are_extreme(subject: Subject, depth: int) -> None:
    """At one engine, at the same time: each gets as many tokens as it requests, or a reason before it waits."""
    settings = EngineSettings(model="any", max_num_seqs=NUM_SLOTS, step_depth=depth)  # type: ignore[arg-type]
    engine = Engine(settings, subject.runner, subject.eos, MAX_MODEL_LEN, "revision")
    made: dict[str, int] = {}
    for index, fields in enumerate(EXTREMES):
        sampling = SamplingParams(**({"max_tokens": 6} | fields))  # type: ignore[arg-type]
        request = Request(
            request_id=str(index), prompt_token_ids=subject.prompt(index, 20), sampling=sampling, noise_seed=index
        )
        refusal = subject.runner.refuses(request)
        if refusal is not None:
            assert refusal.split(" ")[0] in sampling.__struct_fields__, "a refusal begins with the parameter's name"
            with pytest.raises(ValueError, match="stop_token_ids"):
                engine.add(request)
            continue
        engine.add(request)
        made[request.request_id] = 0
    for _ in range(2_000):
        if not engine.has_work:
            break
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            assert all(0 <= token < subject.vocabulary for token in output.token_ids)
            made[output.request_id] += len(output.token_ids)
    assert not engine.has_work
    assert len(made) >= len(EXTREMES) - 3
    for request_id, count in made.items():
        fields = EXTREMES[int(request_id)]
        least = fields.get("min_tokens", 1)
        assert isinstance(least, int)
        assert count >= least
