"""Stages as processes over gloo: the same texts as one process, and the end of a rank is the end of all."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from mini_infer_engine import LLM, BeamSearchParams, SamplingParams
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.core.batch import RunnerLostError
from mini_infer_engine.core.request import Request
from mini_infer_engine.distributed.parallel_runner import ParallelRunner
from mini_infer_engine.structured.params import StructuredOutputsParams
from tests.engine.models.test_models import VARIANTS
from tests.support import parallel_asks
from tests.support.parallel_asks import GREEDY, SHARED, results_of, small_llm
from tests.support.tiny_models import save_tiny_model

PROMPTS = [*parallel_asks.PROMPTS, [(position * 17 + 3) % 190 + 5 for position in range(33)]]
SAMPLING_PARAMS = [
    *parallel_asks.SAMPLING_PARAMS,
    SamplingParams(temperature=0.7, seed=9, max_tokens=20, frequency_penalty=0.4, ignore_eos=True),
]
SETTINGS: dict[str, Any] = {"max_num_batched_tokens": 32}


def _engine(folder: Path | str, stages: int, size: int = 1, **settings: Any) -> LLM:
    return small_llm(folder, pipeline_parallel_size=stages, tensor_parallel_size=size, **settings)


def _logprobs(llm: LLM) -> list[float]:
    (made,) = llm.generate([{"prompt_token_ids": PROMPTS[2]}], SAMPLING_PARAMS[2], use_tqdm=False)
    token_logprobs = [*(made.prompt_logprobs or [])[1:], *(made.outputs[0].logprobs or [])]
    return [one.logprob for position in token_logprobs for one in (position or {}).values()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    save_tiny_model(path, "qwen3", tie_word_embeddings=True)
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> LLM:
    """One process has the whole model; tests that look at the prefix cache begin with prompts of their own."""
    return _engine(folder, 1, **SETTINGS)


@pytest.fixture(scope="module")
def staged(folder: Path) -> LLM:
    return _engine(folder, 2, **SETTINGS)


@pytest.fixture(scope="module")
def grid() -> LLM:
    """Two stages of two ranks, with hardly more pages than two sequences take."""
    settings = {"kv_cache_memory": 550_000, "max_model_len": 128, "kv_swap_memory": 8_000_000}
    return _engine("demo", 2, 2, skip_tokenizer_init=False, **settings)


def test_pipeline_outputs_equal_one_process_for_all_sampling_features(alone: LLM, staged: LLM) -> None:
    assert results_of(staged, PROMPTS, SAMPLING_PARAMS) == results_of(alone, PROMPTS, SAMPLING_PARAMS)
    assert _logprobs(staged) == pytest.approx(_logprobs(alone), abs=1e-4)
    followed = [[*SHARED, *prompt] for prompt in PROMPTS]
    for prompts in (followed[:1], followed):
        assert results_of(staged, prompts, GREEDY) == results_of(alone, prompts, GREEDY)


def test_pipeline_beams_and_embeddings_equal_one_process(alone: LLM, staged: LLM) -> None:
    search = BeamSearchParams(beam_width=3, max_tokens=8)
    beams = [llm.beam_search([{"prompt_token_ids": PROMPTS[0]}], search)[0].sequences for llm in (alone, staged)]
    assert [beam.tokens for beam in beams[1]] == [beam.tokens for beam in beams[0]]
    embeddings = [llm.embed([{"prompt_token_ids": PROMPTS[1]}], use_tqdm=False)[0] for llm in (alone, staged)]
    assert embeddings[1].outputs.embedding == pytest.approx(embeddings[0].outputs.embedding, abs=1e-4)


def test_other_sequences_are_unchanged_when_some_are_aborted_in_the_pipeline(alone: LLM, staged: LLM) -> None:
    """Two of eight sequences go while passes with them are in flight; the others notice nothing."""
    engine = staged._engine
    sampling_params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [[number + 20, *PROMPTS[number % 4]] for number in range(8)]
    for number, prompt in enumerate(prompts):
        engine.add(Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling_params))
    made: dict[str, list[int]] = {str(number): [] for number in range(8)}
    most = 0
    for step in range(1000):
        for output in engine.step():
            made[output.request_id] += output.token_ids
        most = max(most, len(engine._in_flight))
        if step == 30:
            engine.abort("1")
            engine.abort("6")
        if not engine.has_work:
            break
    assert most == 2  # and one more before each commit
    kept = [number for number in range(8) if number not in (1, 6)]
    expected = results_of(alone, [prompts[number] for number in kept], sampling_params)
    assert [made[str(number)] for number in kept] == [tokens for tokens, _ in expected]


def test_pipeline_of_tensor_parallel_stages_equals_one_process_under_memory_pressure(grid: LLM) -> None:
    """The demo model: sequences are preempted and swapped, some are held to a choice."""
    yes_or_no = StructuredOutputsParams(choice=["yes", "no"])
    sampling_params = [SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)] * 5
    sampling_params += [SamplingParams(temperature=0, max_tokens=24, structured_outputs=yes_or_no)]
    prompts = ["def main():", "class Engine:", "import os", "for i in", "# sort", "Answer yes or no:"]
    alone = _engine("demo", 1, skip_tokenizer_init=False)
    texts = [
        [one.outputs[0].text for one in llm.generate(prompts, sampling_params, use_tqdm=False)] for llm in (alone, grid)
    ]
    assert texts[1] == texts[0]
    assert grid._engine.scheduler.kv_cache.num_swaps > 0


def test_pipeline_texts_equal_one_process_when_layers_have_a_recurrent_state(tmp_path: Path) -> None:
    """Sequences are chunked, preempted and swapped, and prompts resume from checkpoints of both stages."""
    architecture, changes = VARIANTS["qwen3-next"]
    save_tiny_model(tmp_path, architecture, **changes | {"full_attention_interval": 2})
    small = {"kv_cache_memory": 420_000, "max_model_len": 128, "kv_swap_memory": 8_000_000}
    staged, alone = _engine(tmp_path, 2, **SETTINGS | small), _engine(tmp_path, 1, **SETTINGS)
    followed = [[*SHARED, *prompt] for prompt in PROMPTS]
    for prompts in (PROMPTS, followed, followed):
        made, expected = (results_of(llm, prompts, GREEDY) for llm in (staged, alone))
        assert [tokens for tokens, _ in made] == [tokens for tokens, _ in expected]
    assert staged._engine.stats().cached_prompt_tokens


@pytest.mark.parametrize(
    ("fixture", "rank", "number"), [("staged", 1, signal.SIGKILL), ("grid", 3, signal.SIGSTOP)], ids=["killed", "hangs"]
)
def test_the_group_ends_with_the_reason_when_a_rank_ends(
    fixture: str, rank: int, number: signal.Signals, request: pytest.FixtureRequest
) -> None:
    llm: LLM = request.getfixturevalue(fixture)
    runner = llm._engine._runner
    assert isinstance(runner, ParallelRunner)
    os.kill(runner.ranks.processes[rank].pid, number)
    group = "pipeline-parallel" if fixture == "staged" else "tensor- and pipeline-parallel"
    words = "killed by signal 9" if number == signal.SIGKILL else "hangs: no heartbeat"
    with pytest.raises(RunnerLostError, match=f"rank {rank} .*{group}.*{words}"):
        results_of(llm, PROMPTS, GREEDY)
    with pytest.raises(RunnerLostError, match=f"rank {rank}"):  # and there is no more to be had
        results_of(llm, PROMPTS, GREEDY)


def test_pipeline_parallelism_is_refused_by_name_when_unsupported(folder: Path) -> None:
    with pytest.raises(ValueError, match="pipeline-parallel-size: speculative decoding"):
        _engine(folder, 2, speculative_method="ngram")
    with pytest.raises(ModelError, match=r"3 layers.*4 stages"):
        _engine(folder, 4)
