"""Passes through the stages of a pipeline: as many in flight as there are stages, each with its share of the decodes.

That tokens are right whatever happens, test_engine_events.py shows with random numbers of stages.
"""

import pytest

from mini_infer_engine.core.request import Request, SamplingParams
from tests.support.engine_world import make_engine

LENGTH = 40


def _add(engine: object, number: int, prompt: int = 5, output: int = 12) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    tokens = [number + 1] * prompt
    engine.add(Request(request_id=str(number), prompt_token_ids=tokens, sampling=sampling))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("num_stages", "step_depth"), [(2, 0), (2, 1), (4, 0), (4, 1)])
def test_every_pipeline_stage_has_a_pass_with_equally_many_decodes(num_stages: int, step_depth: int) -> None:
    engine, runner = make_engine(64, 16, LENGTH, pipeline_parallel_size=num_stages, step_depth=step_depth)
    for number in range(8):
        _add(engine, number)
    in_flight = []
    while engine.has_work:
        engine.step()
        in_flight.append(len(engine._in_flight))
    # All prompts are one pass; then each pass has a share of the decodes, until fewer are left to be shared.
    decodes = [batch.num_decodes for batch in runner.batches[1:]]
    assert sum(decodes) == 8 * 11
    assert set(decodes[: 10 * num_stages]) == {8 // num_stages}
    busy = in_flight[num_stages + 1 : 10 * num_stages]
    assert set(busy) == {num_stages - 1 + step_depth}  # after a commit; before it, one more


def test_a_lone_sequence_runs_one_pass_ahead_of_the_host() -> None:
    engine, runner = make_engine(16, 16, LENGTH, pipeline_parallel_size=4)
    _add(engine, 0)
    outputs, in_flight = [], []
    for _ in range(30):
        outputs += engine.step()
        in_flight.append(len(engine._in_flight))
    assert sum(len(output.token_ids) for output in outputs) == 12
    assert len(runner.batches) == 12
    assert set(in_flight[2:20]) == {1, 2}


def test_a_prompt_is_scheduled_when_other_rows_wait_for_their_tokens() -> None:
    engine, runner = make_engine(64, 16, 150, pipeline_parallel_size=2, max_num_batched_tokens=16)
    _add(engine, 0)
    engine.step()
    _add(engine, 1, prompt=64, output=2)
    for _ in range(4):
        engine.step()
    assert [len(batch.rows) - batch.num_decodes for batch in runner.batches] == [1] * 5  # a chunk in each


def test_chunks_of_a_prompt_fill_the_pipeline_without_waiting() -> None:
    engine, runner = make_engine(16, 16, 150, pipeline_parallel_size=4, max_num_batched_tokens=16)
    _add(engine, 0, prompt=64, output=2)
    launched = []
    for _ in range(4):
        engine.step()
        launched.append(len(engine._in_flight))
    assert launched == [1, 2, 3, 4]
    assert [batch.num_tokens for batch in runner.batches] == [16] * 4


def test_all_sequences_progress_when_they_do_not_divide_by_the_stages() -> None:
    engine, runner = make_engine(64, 16, LENGTH, pipeline_parallel_size=3)
    for number in range(5):
        _add(engine, number, output=30)
    for _ in range(60):
        engine.step()
    counts = [0] * 5
    for batch in runner.batches[1:]:
        for row in batch.rows[: batch.num_decodes]:
            counts[row.slot] += 1
    assert max(counts) - min(counts) <= 1
