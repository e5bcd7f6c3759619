"""Two and four ranks as processes over gloo: the same texts as one process, and the end of a rank is the end of all.

What each architecture and scheme computes on two and four ranks is in test_sharded_models.py, without processes.
"""

import ctypes
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import zmq

from mini_infer_engine import LLM, BeamSearchParams, SamplingParams
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.batch import Batch, Row, RunnerLostError
from mini_infer_engine.core.kv_transfer import LayerProgress
from mini_infer_engine.distributed.heartbeats import SILENT_TICKS, TICK_S
from mini_infer_engine.distributed.parallel_runner import ParallelRunner, load_parallel, send_step
from mini_infer_engine.structured.params import StructuredOutputsParams
from tests.support.integer_checkpoints import quantize_folder as quantize_integers
from tests.support.mixed_checkpoints import Group
from tests.support.mixed_checkpoints import quantize_folder as quantize_mixed
from tests.support.parallel_asks import GREEDY, PROMPTS, SAMPLING_PARAMS, SHARED, results_of, small_llm
from tests.support.tiny_models import DEEPSEEK, DEEPSEEK_V3, GATED_DELTA, GATED_MOE, save_tiny_model


def _engine(folder: Path | str, size: int, **settings: Any) -> LLM:
    return small_llm(folder, tensor_parallel_size=size, **settings)


def _runner(llm: LLM) -> ParallelRunner:
    runner = llm._engine._runner
    assert isinstance(runner, ParallelRunner)
    return runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    save_tiny_model(path, "qwen3", tie_word_embeddings=True)
    return path


@pytest.fixture(scope="module")
def group(folder: Path) -> LLM:
    """Two ranks, of which the last test ends one."""
    return _engine(folder, 2)


@pytest.fixture(scope="module")
def swapping(folder: Path) -> LLM:
    """Two ranks, as `group`, with pages for hardly more than two sequences."""
    return _engine(folder, 2, kv_cache_memory=250_000, max_model_len=120, kv_swap_memory=4_000_000)


def test_tensor_parallel_outputs_equal_one_process_for_all_sampling_features(folder: Path) -> None:
    """On four ranks, of which each two share a head of keys and values; groups of two are in the tests below."""
    settings = {"max_num_batched_tokens": 32}
    alone, group = _engine(folder, 1, **settings), _engine(folder, 4, **settings)
    assert results_of(group, PROMPTS, SAMPLING_PARAMS) == results_of(alone, PROMPTS, SAMPLING_PARAMS)
    followed = [[*SHARED, *prompt] for prompt in PROMPTS]
    for prompts in (followed[:1], followed):
        assert results_of(group, prompts, GREEDY) == results_of(alone, prompts, GREEDY)
    search = BeamSearchParams(beam_width=3, max_tokens=8)
    beams = [llm.beam_search([{"prompt_token_ids": PROMPTS[0]}], search)[0].sequences for llm in (alone, group)]
    assert [beam.tokens for beam in beams[1]] == [beam.tokens for beam in beams[0]]
    embeddings = [llm.embed([{"prompt_token_ids": PROMPTS[1]}], use_tqdm=False)[0] for llm in (alone, group)]
    assert embeddings[1].outputs.embedding == pytest.approx(embeddings[0].outputs.embedding, abs=1e-4)


@pytest.mark.parametrize(
    ("architecture", "changes", "settings"),
    [
        ("deepseek_v3", DEEPSEEK_V3, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("deepseek_v2", DEEPSEEK, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        ("gemma2", {"head_dim": 16, "sliding_window": 20}, {"tensor_parallel_size": 2}),
    ],
)
def test_ranks_compute_the_text_of_one_process_when_their_cache_is_latents_or_kv_groups(
    architecture: str, changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    """In chunks, from the prefix cache, and as beams, whose prefixes are shared."""
    save_tiny_model(tmp_path, architecture, **changes)
    alone, group = (small_llm(tmp_path, max_num_batched_tokens=32, **more) for more in ({}, settings))
    assert results_of(group, PROMPTS, SAMPLING_PARAMS) == results_of(alone, PROMPTS, SAMPLING_PARAMS)
    followed = [[*SHARED, *prompt] for prompt in PROMPTS]
    for prompts in (followed[:1], followed):
        found = results_of(group, prompts, GREEDY)
        assert found == results_of(alone, prompts, GREEDY)
    assert all(num_cached >= 32 for _, num_cached in found)
    search = BeamSearchParams(beam_width=3, max_tokens=8)
    beams = [llm.beam_search([{"prompt_token_ids": PROMPTS[0]}], search)[0].sequences for llm in (alone, group)]
    assert [beam.tokens for beam in beams[1]] == [beam.tokens for beam in beams[0]]


def test_ranks_compute_the_text_of_one_process_when_layers_have_a_recurrent_state(tmp_path: Path) -> None:
    """In chunks, and from checkpoints of each rank's own states."""
    save_tiny_model(tmp_path, "qwen3_next", **GATED_DELTA | GATED_MOE)
    alone, group = (_engine(tmp_path, size, max_num_batched_tokens=32) for size in (1, 2))
    assert results_of(group, PROMPTS, SAMPLING_PARAMS) == results_of(alone, PROMPTS, SAMPLING_PARAMS)
    followed = [[*SHARED, *prompt] for prompt in PROMPTS]
    for prompts in (followed[:1], followed):
        found = results_of(group, prompts, GREEDY)
        assert found == results_of(alone, prompts, GREEDY)
    assert all(num_cached >= 32 for _, num_cached in found)


def test_tensor_parallel_text_equals_one_process_for_mixed_quantisation(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", hidden_size=128, intermediate_size=128, head_dim=32)
    down = Group("compressed-channel", ("re:.*down_proj",), ("down_proj",))
    quantize_mixed(tmp_path, [down, Group("nvfp4", ("Linear",), ("_proj",))])
    alone, group = _engine(tmp_path, 1), _engine(tmp_path, 2)
    assert results_of(group, PROMPTS, SAMPLING_PARAMS) == results_of(alone, PROMPTS, SAMPLING_PARAMS)


def test_tensor_parallel_text_equals_one_process_for_integer_quantisation(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", hidden_size=64, intermediate_size=128, head_dim=32)
    quantize_integers(tmp_path, "gptq-act-order")
    alone, group = _engine(tmp_path, 1), _engine(tmp_path, 2)
    assert results_of(group, PROMPTS, SAMPLING_PARAMS) == results_of(alone, PROMPTS, SAMPLING_PARAMS)


def test_a_group_reports_layer_progress_before_its_pass_ends(folder: Path) -> None:
    """Of two passes on their way, each by itself."""
    settings = EngineSettings(model=str(folder), device="cpu", kv_cache_memory=1_000_000, tensor_parallel_size=2)
    runner = load_parallel(settings, reports_layers=True)
    num_layers, results_of = runner.kv_memory().layout.num_layers, list[LayerProgress]()
    rows = [Row(0, 0, 9, PROMPTS[0][:9], [page], None) for page in range(2)]
    handles = [runner.launch(Batch([row], 0, report_layers=results_of.append)) for row in rows]
    assert [layers.num_done() for layers in results_of] == [num_layers - 1] * 2
    runner.collect(handles[0])
    assert [layers.num_done() for layers in results_of] == [num_layers, num_layers - 1]
    runner.collect(handles[1])
    assert [layers.num_done() for layers in results_of] == [num_layers] * 2
    runner.ranks.close()


def test_preempted_sequences_are_swapped_on_every_rank(folder: Path, swapping: LLM) -> None:
    prompts = [[(position * step + 3) % 190 + 5 for position in range(60)] for step in (3, 7, 11, 13, 17, 19)]
    sampling_params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    assert [one[0] for one in results_of(swapping, prompts, sampling_params)] == [
        one[0] for one in results_of(_engine(folder, 1), prompts, sampling_params)
    ]


def test_every_rank_keeps_the_cached_tokens_that_one_process_keeps(folder: Path) -> None:
    prompts = [[(position * step + 3) % 190 + 5 for position in range(90)] for step in (3, 7, 11)]
    fields = ({}, {"kv_policy": "streaming-llm", "kv_budget": 20}, {"kv_policy": "snapkv", "kv_budget": 70})
    sampling = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    sampling_params = [SamplingParams(**sampling, **its_fields) for its_fields in fields]
    settings: dict[str, Any] = {"kv_policy": "h2o", "kv_budget": 30, "max_num_batched_tokens": 100}
    alone, group = (_engine(folder, size, **settings) for size in (1, 2))
    expected = results_of(alone, prompts, sampling_params)
    assert results_of(group, prompts, sampling_params) == expected
    assert expected != results_of(alone, prompts, SamplingParams(**sampling, kv_policy="full"))


def test_tensor_parallel_text_of_the_demo_model_equals_one_process_with_grammars() -> None:
    sampling_params = [
        SamplingParams(temperature=0, max_tokens=24),
        SamplingParams(temperature=0, max_tokens=24, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])),
    ]
    prompts = ["def main():", "Answer yes or no:"]
    texts = [
        [
            one.outputs[0].text
            for one in _engine("demo", size, skip_tokenizer_init=False).generate(
                prompts, sampling_params, use_tqdm=False
            )
        ]
        for size in (1, 2)
    ]
    assert texts[0] == texts[1]


def test_ranks_survive_when_the_first_process_is_blocked_for_seconds(group: LLM) -> None:
    """As where it parses a large file, or reads a large vocabulary: other threads of it have no turn meanwhile."""
    before = [one[0] for one in results_of(group, PROMPTS, GREEDY)]
    ctypes.PyDLL(None).usleep(int((SILENT_TICKS + 3) * TICK_S * 1e6))
    assert [one[0] for one in results_of(group, PROMPTS, GREEDY)] == before


@pytest.mark.parametrize(("fixture", "number"), [("group", signal.SIGKILL), ("swapping", signal.SIGSTOP)])
def test_the_group_ends_with_the_reason_when_a_rank_ends(
    fixture: str, number: signal.Signals, request: pytest.FixtureRequest
) -> None:
    llm: LLM = request.getfixturevalue(fixture)
    process = _runner(llm).ranks.processes[1]
    os.kill(process.pid, number)
    words = "killed by signal 9" if number == signal.SIGKILL else "hangs: no heartbeat"
    with pytest.raises(RunnerLostError, match=f"rank 1 .*{words}"):
        results_of(llm, PROMPTS, GREEDY)
    with pytest.raises(RunnerLostError, match="rank 1"):  # and there is no more to be had
        results_of(llm, PROMPTS, GREEDY)


def test_sending_to_a_rank_raises_when_the_group_has_ended() -> None:
    looks = iter(("", "", "rank 1 has ended"))
    with zmq.Context.instance().socket(zmq.PUSH) as socket, pytest.raises(RunnerLostError, match="rank 1 has ended"):
        send_step(socket, b"step", lambda: next(looks))


def test_a_model_is_refused_and_no_process_is_left_when_it_cannot_be_sharded(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"num_attention_heads = 4.*3"):
        _engine(folder, 3)
    broken = save_and_break(tmp_path)
    with pytest.raises(ModelError, match="safetensors"):
        _engine(broken, 2)


def save_and_break(folder: Path) -> Path:
    """A model whose weights were cut short."""
    save_tiny_model(folder, "llama")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return folder
