"""Beams on the fake runner: which pages they share, what they leave behind, and who waits for whom."""

import pytest

from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import BeamSearch, EarlyStopping, Request, SamplingParams
from tests.support.engine_world import make_engine
from tests.support.fake_runner import expected_beams, expected_tokens

MAX_MODEL_LEN = 256
PROMPT = [5] * 70


def search(name: str = "s", width: int = 4, early: EarlyStopping = False, **sampling: object) -> Request:
    ids = [name, *(f"{name}.{index}" for index in range(1, width))]
    return Request(
        request_id=name,
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        beam_search=BeamSearch(request_ids=ids, early_stopping=early),
    )


def drain(engine: Engine) -> dict[str, list[int]]:
    made: dict[str, list[int]] = {}
    for _ in range(2_000):
        if not engine.has_work:
            return made
        for output in engine.step():
            assert output.finish_reason in (None, "stop", "length"), output.error
            made.setdefault(output.request_id, []).extend(output.token_ids)
    raise AssertionError("stuck")


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("caching", [True, False])
def test_beams_share_full_pages_and_copy_the_last_one_when_they_part(depth: int, caching: bool) -> None:
    engine, runner = make_engine(40, 16, MAX_MODEL_LEN, step_depth=depth, enable_prefix_caching=caching)
    request = search(max_tokens=12, ignore_eos=True)
    engine.add(request)
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.scheduler.kv_cache.pool.num_pages - engine.scheduler.kv_cache.pool.num_free)
    assert most <= 4 + 4 * 2, "four full pages of the prompt, and at most two pages for each beam"
    copies = [copy for batch in runner.batches for copy in batch.transfers.copies]
    assert copies
    assert all(0 < copy.tokens < 16 for copy in copies)
    assert sum(row.count for row in runner.batches[0].rows) == len(PROMPT)
    assert all(sum(row.count for row in batch.rows) <= 4 for batch in runner.batches[1:]), "nothing is computed twice"
    assert not any(engine.scheduler.kv_cache.pool.references)


@pytest.mark.parametrize("depth", [0, 1])
def test_other_requests_decode_when_beams_wait_for_their_commit(depth: int) -> None:
    engine, runner = make_engine(100, 16, MAX_MODEL_LEN, step_depth=depth)
    plain = Request(
        request_id="plain",
        prompt_token_ids=[6] * 20,
        sampling=SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    )
    request = search(max_tokens=12, ignore_eos=True)
    engine.add(plain)
    engine.add(request)
    made = drain(engine)
    assert request.beam_search is not None
    assert [made[name] for name in request.beam_search.request_ids] == expected_beams(request, MAX_MODEL_LEN)
    assert made["plain"] == expected_tokens(plain, MAX_MODEL_LEN)
    assert len(runner.batches) <= 31, "the plain request got a row in each pass"


def test_all_beams_are_freed_when_a_beam_search_is_aborted() -> None:
    engine, _ = make_engine(40, 16, MAX_MODEL_LEN, max_num_seqs=4)
    engine.add(search(max_tokens=50, ignore_eos=True))
    for _ in range(9):
        engine.step()
    assert engine.load().running == 4
    engine.abort("s")
    engine.step()
    engine.step()
    assert not engine.has_work
    assert not any(engine.scheduler.kv_cache.pool.references)
    engine.add(search("again", max_tokens=2))
    assert len(drain(engine)) == 4


def test_a_beam_search_waits_until_it_has_a_slot_for_each_beam() -> None:
    engine, _ = make_engine(100, 16, MAX_MODEL_LEN, max_num_seqs=5)
    for name in ("a", "b"):
        engine.add(
            Request(request_id=name, prompt_token_ids=[1] * 5, sampling=SamplingParams(max_tokens=20, ignore_eos=True))
        )
    engine.add(search(max_tokens=3))
    for _ in range(10):
        engine.step()
    assert engine.load().waiting == 1
    assert {"s", "s.1", "s.2", "s.3", "a", "b"} == set(drain(engine)) | {"a", "b"}


def test_logprobs_are_those_of_the_remaining_beams() -> None:
    engine, _ = make_engine(40, 16, MAX_MODEL_LEN)
    request = search(max_tokens=6, logprobs=2, ignore_eos=True)
    engine.add(request)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    for output in outputs:
        assert [position.token_id for position in output.logprobs] == output.token_ids
        assert all(len(position.top_token_ids) == 2 for position in output.logprobs)
        assert sum(position.logprob for position in output.logprobs) == pytest.approx(output.cumulative_logprob)
    scores = [output.beam_score or 0.0 for output in outputs]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    ("request_", "wrong"),
    [
        (search(width=9, max_tokens=2), "n is 9"),
        (search(width=8, max_tokens=100), "max_tokens.*60 pages.*40"),
    ],
)
def test_a_beam_search_is_refused_when_it_could_never_be_admitted(request_: Request, wrong: str) -> None:
    engine, _ = make_engine(40, 16, MAX_MODEL_LEN, max_num_seqs=8)
    with pytest.raises(ValueError, match=wrong):
        engine.add(request_)
    assert not engine.has_work


def test_a_beam_pass_is_launched_in_the_step_that_commits_the_previous_one() -> None:
    engine, runner = make_engine(40, 16, MAX_MODEL_LEN, step_depth=1)
    engine.add(search(max_tokens=12, ignore_eos=True))
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    assert len(runner.batches) == 12
    assert steps == 13
