"""Passes with guesses on a GPU make the plain engine's text; whole, by graphs, and in small by Triton's interpreter."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.core.batch import Row
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.grammars.compiler import GrammarCompiler
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core.speculation.controller import DraftController
from mini_infer_engine.core.stats import EngineStats
from mini_infer_engine.dry.vocabulary import EOS_TOKEN_IDS, VOCAB_SIZE, dry_assets
from mini_infer_engine.kernels.attention import attention_config
from mini_infer_engine.layers import linear
from mini_infer_engine.runtime.attention.triton_attention import TritonAttention
from mini_infer_engine.runtime.cuda import captured_graphs, draft_reading
from mini_infer_engine.runtime.cuda import executor as cuda_executor
from mini_infer_engine.runtime.cuda import graphs as cuda_graphs
from mini_infer_engine.runtime.cuda import sampling as cuda_sampling
from mini_infer_engine.runtime.cuda import speculation as cuda_speculation
from mini_infer_engine.runtime.cuda.executor import CudaExecutor
from mini_infer_engine.runtime.model_runner import ModelRunner
from mini_infer_engine.speculation.head import HeadShape, SpeculativeHead
from mini_infer_engine.structured.grammar import Grammar, of_regex
from tests.gpu.device import GPU_ONLY, INTERPRETED
from tests.gpu.runs import make_engine, make_runner, make_settings, mixed_requests, texts
from tests.support.tiny_models import save_tiny_model, shifted_positions

NGRAM: dict[str, Any] = {"speculative_method": "ngram", "prompt_lookup_min": 1}


def save_pair(folder: Path, **changes: Any) -> tuple[Path, Path]:
    """A model, and one that is nearly the same."""
    target, draft = folder / "target", folder / "draft"
    model = save_tiny_model(target, "qwen3", **changes)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01 * parameter.std())
    model.save_pretrained(draft)
    return target, draft


@pytest.fixture
def both_checks(enforce_eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In CUDA graphs guesses are checked by attention of their own kernel, kernel by kernel as prompt chunks are."""
    monkeypatch.setattr(attention_config, "MOST_CHECKED_SEQUENCES", 0 if enforce_eager else 128)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses are made, however long passes with them take."""
    monkeypatch.setattr(DraftController, "choose", lambda self, *_, **__: self.levels[-1])


def run(folder: Path, requests: list[Request], **options: Any) -> tuple[list[list[int]], EngineStats]:
    settings = make_settings(folder, **options)
    runner = make_runner(settings)
    engine = make_engine(runner.settings, runner)
    return texts(engine, requests), engine.stats()


def method_of(method: str, draft: Path) -> dict[str, Any]:
    if method == "head":
        return {"speculative_method": "head", "speculative_model": str(save_head(draft.with_name("head")))}
    return NGRAM if method == "ngram" else {"speculative_model": str(draft)}


def save_head(folder: Path) -> Path:
    """An untrained head for the tiny model: what it guesses is seldom right."""
    folder.mkdir()
    shape = HeadShape(hidden_size=64, width=32, intermediate_size=48, layers=(0, 1))
    torch.manual_seed(5)
    save_file(SpeculativeHead(shape).state_dict(), str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(shape.to_config()))
    return folder


# -- On a GPU

METHODS = pytest.mark.parametrize("method", ["ngram", "draft", "head"])


@METHODS
@pytest.mark.parametrize("step_depth", [0, 1])
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.usefixtures("always", "both_checks")
@pytest.mark.parametrize("gpu", [pytest.param(None, marks=GPU_ONLY)])
def test_the_text_is_that_of_the_plain_engine(
    tmp_path: Path, method: str, step_depth: int, enforce_eager: bool, gpu: None
) -> None:
    """Beside each other: all kinds of sampling, requests that guess nothing, prompts of all lengths."""
    del gpu
    target, draft = save_pair(tmp_path, head_dim=64)
    requests = mixed_requests(36, 199, 90)
    plain, _ = run(target, requests)
    options = method_of(method, draft) | {"step_depth": step_depth, "enforce_eager": enforce_eager}
    guessed, stats = run(target, requests, num_speculative_tokens=4, **options)
    different = [index for index, (one, other) in enumerate(zip(plain, guessed, strict=True)) if one != other]
    assert not different
    assert stats.draft_tokens > 100
    if method == "draft":
        assert sum(stats.accepted_tokens_by_position) > stats.draft_tokens / 3


@METHODS
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("gpu", [pytest.param(None, marks=GPU_ONLY)])
def test_the_same_where_positions_are_ahead_of_cache_indexes(tmp_path: Path, method: str, gpu: None) -> None:
    """Rotation knows distances alone, so that a text further on is the same text."""
    del gpu
    target, draft = save_pair(tmp_path, head_dim=64)
    requests = mixed_requests(36, 199, 90)
    plain, _ = run(target, requests)
    with shifted_positions(101):
        guessed, stats = run(target, requests, num_speculative_tokens=4, **method_of(method, draft))
    assert guessed == plain
    assert stats.draft_tokens > 100
    if method == "draft":
        assert sum(stats.accepted_tokens_by_position) > stats.draft_tokens / 3


@METHODS
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("gpu", [pytest.param(None, marks=GPU_ONLY)])
def test_the_same_with_few_pages_and_small_chunks(tmp_path: Path, method: str, gpu: None) -> None:
    del gpu
    target, draft = save_pair(tmp_path, head_dim=64)
    requests = mixed_requests(24, 199, 90)
    plain, _ = run(target, requests)
    small = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "page_size": 16, "max_model_len": 192}
    guessed, stats = run(target, requests, **small, **method_of(method, draft), kv_cache_memory=2_000_000)
    assert guessed == plain
    assert stats.draft_tokens > 50


@pytest.mark.parametrize("gpu", [pytest.param(None, marks=GPU_ONLY)])
def test_a_controller_that_comes_and_goes_changes_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: None
) -> None:
    """Passes with and without guesses follow each other: the draft reads what it missed."""
    del gpu
    target, draft = save_pair(tmp_path, head_dim=64)
    turns = iter(range(1 << 20))
    choices = (4, 4, 0, 1, 0, 0, 3, 4)
    monkeypatch.setattr(DraftController, "choose", lambda *_, **__: choices[next(turns) % len(choices)])
    requests = mixed_requests(24, 199, 90)
    plain, _ = run(target, requests)
    guessed, stats = run(target, requests, speculative_model=str(draft), num_speculative_tokens=4)
    assert guessed == plain
    assert sum(stats.accepted_tokens_by_position) > stats.draft_tokens / 3


@pytest.mark.parametrize("gpu", [pytest.param(None, marks=GPU_ONLY)])
@pytest.mark.usefixtures("always")
def test_a_draft_that_is_the_model_itself_is_right(tmp_path: Path, gpu: None) -> None:
    del gpu
    target, _ = save_pair(tmp_path, head_dim=64)
    requests = [
        Request(
            request_id=str(index),
            prompt_token_ids=list(range(5, 30 + index)),
            sampling=SamplingParams(temperature=index / 4, max_tokens=60, ignore_eos=True),
            noise_seed=index,
        )
        for index in range(4)
    ]
    _, stats = run(target, requests, speculative_model=str(target), num_speculative_tokens=3)
    assert sum(stats.accepted_tokens_by_position) > 0.9 * stats.draft_tokens


@METHODS
@pytest.mark.parametrize("gpu", [pytest.param(None, marks=GPU_ONLY)])
def test_passes_are_timed_before_the_first_request(tmp_path: Path, method: str, gpu: None) -> None:
    del gpu
    target, draft = save_pair(tmp_path, head_dim=64)
    costs = make_runner(make_settings(target, num_speculative_tokens=4, **method_of(method, draft))).guess_costs
    assert set(costs.pass_s) == {(rows, drafts) for rows in (1, 2, 4, 8, 16) for drafts in (1, 3, 4)}
    assert all(0 < seconds < 0.1 for seconds in costs.pass_s.values())
    assert [tokens for tokens, _ in costs.reading] == ([16, 128, 512] if method == "draft" else [])
    assert all(0 < seconds < 0.5 for _, seconds in costs.reading)


def check_both_readings(runner: ModelRunner) -> None:
    """What a draft reads by CUDA graphs, a few tokens of each row, it knows as if launched kernel by kernel."""
    executor = runner.executor
    assert isinstance(executor, CudaExecutor)
    assert executor.speculation is not None
    reading = executor.speculation._reading
    assert reading is not None
    page_size, dice = runner.page_size, torch.Generator().manual_seed(7)
    tables = [[2, 0, 5], [4, 1, 3]]
    longest = 2 * page_size + 5
    texts = torch.randint(5, 190, (2, longest), generator=dice).tolist()

    def rows(*spans: tuple[int, int, int]) -> list[Row]:
        return [Row(slot, a, b - a, texts[slot][a:b], tables[slot], None) for slot, a, b in spans]

    reads = [rows((0, 0, 7)), rows((0, 7, 10), (1, 0, 5)), rows((1, 5, 6), (0, 10, 12))]
    assert reading._graphs
    reads.append(rows((1, page_size - 2, page_size + 3), (0, 2 * page_size - 1, longest)))
    made: list[list[torch.Tensor]] = []
    for graphs in (reading._graphs, {}):
        reading._graphs = graphs
        assert isinstance(reading._attention, TritonAttention)
        reading._history.zero_()
        for pages in reading._attention.pages:
            pages.zero_()
        with torch.inference_mode():
            for read in reads:
                reading.read(read)
        made.append([reading._history[:2].clone(), *(pages[:6].clone() for pages in reading._attention.pages)])
    for by_graph, eager in zip(*made, strict=True):
        assert by_graph.float().abs().sum() > 0
        torch.testing.assert_close(by_graph, eager, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("gpu", [pytest.param(None, marks=GPU_ONLY)])
def test_a_draft_reads_by_graphs_what_it_reads_kernel_by_kernel(tmp_path: Path, gpu: None) -> None:
    del gpu
    target, draft = save_pair(tmp_path, head_dim=64)
    check_both_readings(make_runner(make_settings(target, speculative_model=str(draft))))


# -- Without one

interpreted_only = pytest.mark.skipif(not INTERPRETED, reason="runs under TRITON_INTERPRET=1 without a GPU only")


SMALL: dict[str, Any] = {
    "device": "cpu",
    "page_size": 16,
    "kv_cache_memory": 1 << 21,
    "max_num_seqs": 2,
    "max_model_len": 48,
}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[list[int]], EngineStats]]:
    """Runs requests over the GPU's executor on a CPU, where a graph is the function that it records."""
    monkeypatch.setattr(linear, "blocked_weight", lambda weight: None)
    for module in (cuda_graphs, cuda_sampling, cuda_speculation, draft_reading):
        monkeypatch.setattr(module, "record", lambda run, memory: SimpleNamespace(replay=run))
    monkeypatch.setattr(captured_graphs, "prefill_buckets", lambda largest, **_: [16])
    monkeypatch.setattr(cuda_executor, "decode_buckets", lambda largest: [2])
    monkeypatch.setattr(cuda_speculation, "speculative_buckets", lambda largest: [2])
    monkeypatch.setattr(draft_reading, "READ_BUCKETS", (16,))
    monkeypatch.setattr(cuda_speculation, "TIMED_RUNS", 1)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)

    def make(folder: Path, requests: list[Request], **options: Any) -> tuple[list[list[int]], EngineStats]:
        return run(folder, requests, **(SMALL | options))

    return make


@interpreted_only
@pytest.mark.timeout(600)
@METHODS
@pytest.mark.usefixtures("both_checks")
@pytest.mark.parametrize(("enforce_eager", "offset"), [(False, 0), (True, 0), (False, 17)])
def test_in_small_it_is_the_plain_engines_text(
    interpreted: Callable[..., tuple[list[list[int]], EngineStats]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    method: str,
    enforce_eager: bool,
    offset: int,
) -> None:
    """Also where positions are ahead of cache indexes."""
    target, draft = save_pair(tmp_path, head_dim=16, num_hidden_layers=2)
    requested = [
        SamplingParams(temperature=0.8, top_k=20, min_tokens=4, stop_token_ids=[7], max_tokens=7, ignore_eos=True),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=4, ignore_eos=True),
    ]
    requests = [
        Request(
            request_id=str(index), prompt_token_ids=[9, 8, 7, 9, 8][: 3 + index], sampling=sampling, noise_seed=index
        )
        for index, sampling in enumerate(requested)
    ]
    turns = iter(range(1 << 20))
    monkeypatch.setattr(DraftController, "choose", lambda *_, **__: (2, 0, 1, 2)[next(turns) % 4])
    plain, _ = interpreted(target, requests)
    options = method_of(method, draft) | {"enforce_eager": enforce_eager, "num_speculative_tokens": 2}
    with shifted_positions(offset):
        guessed, stats = interpreted(target, requests, **options)
    assert guessed == plain
    assert stats.draft_tokens >= 2
    assert method != "draft" or sum(stats.accepted_tokens_by_position) >= 2


@interpreted_only
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", [None, "ngram", "draft", "head"])
@pytest.mark.usefixtures("always")
def test_in_small_texts_end_with_the_longest_sequence(
    interpreted: Callable[..., tuple[list[list[int]], EngineStats]], tmp_path: Path, method: str | None
) -> None:
    """Guesses stop before: behind it neither page tables nor rotary tables go on (TRITON_BOUNDS=1 sees to it)."""
    target, draft = save_pair(tmp_path, head_dim=16, num_hidden_layers=2)
    requests = [
        Request(
            request_id=str(length),
            prompt_token_ids=[5 + index % 7 for index in range(length)],
            sampling=SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        )
        for length in (41, 44)
    ]
    options = {} if method is None else {"num_speculative_tokens": 3, **method_of(method, draft)}
    made, _ = interpreted(target, requests, **options)
    assert [len(text) for text in made] == [48 - 41, 48 - 44]


@interpreted_only
@pytest.mark.timeout(600)
def test_in_small_a_draft_reads_by_graphs_what_it_reads_kernel_by_kernel(
    interpreted: Callable[..., tuple[list[list[int]], EngineStats]], tmp_path: Path
) -> None:
    del interpreted
    target, draft = save_pair(tmp_path, head_dim=16, num_hidden_layers=2)
    check_both_readings(make_runner(make_settings(target, **SMALL, speculative_model=str(draft))))


MORE: dict[str, dict[str, Any]] = {
    "log probabilities": {"logprobs": 2},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
    "biases and words": {
        "logit_bias": {7: 4.0, 90: 3.0},
        "bad_words_token_ids": [[one, other] for one in range(0, 199, 2) for other in range(1, 199, 3)],
    },
    "all": {
        "logprobs": 0,
        "presence_penalty": 0.5,
        "allowed_token_ids": list(range(5, 60)),
        "bad_words_token_ids": [[9]],
    },
}


def generated_by(engine: Engine, requests: list[Request]) -> list[tuple[list[int], list[tuple[int, float]]]]:
    """Tokens and their log probabilities."""
    made: dict[str, Any] = {request.request_id: ([], []) for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            tokens, numbers = made[output.request_id]
            tokens += output.token_ids
            numbers += [(one.token_id, one.logprob) for one in output.logprobs]
    return list(made.values())


def requests_with(max_tokens: int, more: dict[str, dict[str, Any]], grammar: Grammar | None = None) -> list[Request]:
    made = []
    for index, expected in enumerate(more.values()):
        sampling = SamplingParams(
            temperature=0.9 * (index % 2),
            max_tokens=max_tokens,
            ignore_eos=grammar is None,
            grammar=grammar,
            **expected,
        )
        prompt = [9, 8, 7, 9, 8, 7, 9][: 4 + index % 4]
        made.append(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling, noise_seed=index))
    return made


def equal_with_guesses(target: Path, options: dict[str, Any], requests: list[Request], grammars: bool) -> EngineStats:
    """The counters, after text and numbers were those of the plain engine."""
    made: list[Any] = []
    plain = {name: value for name, value in options.items() if "specul" not in name and "prompt_lookup" not in name}
    for changes in (plain, options):
        runner = make_runner(make_settings(target, **changes))
        compiler = None
        if grammars:
            compiler = GrammarCompiler(lambda: dry_assets().files["tokenizer.json"], VOCAB_SIZE, EOS_TOKEN_IDS)
        engine = Engine(
            runner.settings, runner, EOS_TOKEN_IDS if grammars else (), runner.max_model_len, "", grammars=compiler
        )
        made.append(generated_by(engine, requests))
    for (tokens, numbers), (others, other_numbers) in zip(*made, strict=True):
        assert tokens == others
        assert [token for token, _ in numbers] == [token for token, _ in other_numbers]
        assert [value for _, value in numbers] == pytest.approx([value for _, value in other_numbers], abs=1e-3)
    return engine.stats()


@METHODS
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("gpu", [pytest.param(None, marks=GPU_ONLY)])
def test_what_asks_for_more_is_guessed_on_a_gpu(tmp_path: Path, method: str, enforce_eager: bool, gpu: None) -> None:
    del gpu
    target, draft = save_pair(tmp_path, head_dim=64)
    options = method_of(method, draft) | {"enforce_eager": enforce_eager, "num_speculative_tokens": 4}
    assert equal_with_guesses(target, options, requests_with(40, MORE), grammars=False).drafts > 40


@METHODS
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("gpu", [pytest.param(None, marks=GPU_ONLY)])
def test_output_within_a_grammar_is_guessed_on_a_gpu(tmp_path: Path, method: str, gpu: None) -> None:
    del gpu
    target, draft = save_pair(tmp_path, head_dim=64, vocab_size=VOCAB_SIZE)
    more = {"plain": {}, **{name: {**MORE["log probabilities"], **MORE["penalties"]} for name in "ab"}}
    requests = requests_with(30, more, of_regex("[0-9a-f]{4,20}( [0-9]{3}){1,6}"))
    assert equal_with_guesses(target, method_of(method, draft), requests, grammars=True).drafts > 10


@interpreted_only
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", ["draft"])
def test_in_small_what_asks_for_more_is_the_plain_engines(
    interpreted: Callable[..., tuple[list[list[int]], EngineStats]], always: None, tmp_path: Path, method: str
) -> None:
    """Without grammars, then within one, whose masks follow the guesses."""
    del interpreted, always
    target, draft = save_pair(tmp_path, head_dim=16, num_hidden_layers=1, vocab_size=VOCAB_SIZE)
    options = SMALL | method_of(method, draft) | {"num_speculative_tokens": 2, "enforce_eager": True}
    with_small = partial(equal_with_guesses, target, options)
    assert with_small(requests_with(4, {"all": MORE["all"] | {"logit_bias": {7: 4.0}}}), grammars=False).drafts >= 1
    both = {"both": MORE["log probabilities"] | MORE["penalties"]}
    assert with_small(requests_with(4, both, of_regex("[0-9]{2,6}( [0-9]{2}){1,6}")), grammars=True).drafts >= 1
