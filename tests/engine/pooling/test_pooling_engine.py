"""The pooling engine over a runner that returns lengths: order, refusals, aborts, failures and what gateways read."""

from array import array
from collections.abc import Sequence

import pytest

from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.pooling.engine import MAX_FAILED_PASSES, PoolingEngine, PoolingFailedError


class Lengths:
    """Returns the number of tokens of each request, and records the passes."""

    def __init__(self) -> None:
        self.passes: list[list[str]] = []
        self.error: Exception | None = None

    def compute(self, requests: Sequence[Request]) -> list[bytes]:
        self.passes.append([request.request_id for request in requests])
        if self.error is not None:
            raise self.error
        return [array("f", [len(request.prompt_token_ids)]).tobytes() for request in requests]


@pytest.fixture
def runner() -> Lengths:
    return Lengths()


@pytest.fixture
def engine(runner: Lengths) -> PoolingEngine:
    return PoolingEngine(runner, max_model_len=16, token_budget=32, max_inputs=2)


def request(name: str, length: int = 4, *, priority: int = 0, embeds: bool = True) -> Request:
    ids = list(range(1, length + 1))
    return Request(request_id=name, prompt_token_ids=ids, sampling=SamplingParams(), priority=priority, embeds=embeds)


def results(engine: PoolingEngine) -> dict[str, float]:
    found = {}
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason == "stop"
            (found[output.request_id],) = array("f", output.embedding)
    return found


def test_every_request_gets_its_own_result_when_passes_are_small(engine: PoolingEngine, runner: Lengths) -> None:
    for name, length in (("a", 3), ("b", 16), ("c", 4), ("d", 15)):
        engine.add(request(name, length))
    assert results(engine) == {"a": 3, "b": 16, "c": 4, "d": 15}
    assert runner.passes == [["a", "c"], ["b", "d"]]
    assert engine.step() == []


def test_lower_priorities_are_computed_first(engine: PoolingEngine, runner: Lengths) -> None:
    for name, priority in (("a", 0), ("b", 1), ("c", -1), ("d", 0)):
        engine.add(request(name, priority=priority))
    results(engine)
    assert runner.passes == [["c", "a"], ["d", "b"]]


def test_an_aborted_request_is_not_computed_and_its_id_is_free(engine: PoolingEngine, runner: Lengths) -> None:
    engine.add(request("a"))
    engine.add(request("b"))
    engine.abort("a")
    engine.abort("unknown")
    engine.add(request("a", 5))
    assert results(engine) == {"b": 4, "a": 5}


@pytest.mark.parametrize(
    ("bad", "named"),
    [(request("a"), "'a'"), (request("b", 17), "17"), (request("b", 0), "0"), (request("b", embeds=False), "text")],
)
def test_a_request_is_refused_when_the_model_cannot_compute_it(
    engine: PoolingEngine, runner: Lengths, bad: Request, named: str
) -> None:
    engine.add(request("a"))
    with pytest.raises(ValueError, match=named):
        engine.add(bad)
    assert results(engine) == {"a": 4}


def test_a_failed_pass_ends_its_requests_alone(engine: PoolingEngine, runner: Lengths) -> None:
    for name in "abc":
        engine.add(request(name))
    runner.error = RuntimeError("out of memory")
    failed = engine.step()
    assert [(output.request_id, output.finish_reason) for output in failed] == [("a", "error"), ("b", "error")]
    assert "RuntimeError" in failed[0].error
    runner.error = None
    assert results(engine) == {"c": 4}
    assert engine.stats().failed_passes == 1


def test_the_engine_ends_when_passes_keep_failing(engine: PoolingEngine, runner: Lengths) -> None:
    runner.error = RuntimeError("the device is gone")
    for index in range(2 * MAX_FAILED_PASSES):
        engine.add(request(str(index)))
    for _ in range(MAX_FAILED_PASSES - 1):
        engine.step()
    with pytest.raises(PoolingFailedError, match="the device is gone"):
        engine.step()
    assert len(runner.passes) == MAX_FAILED_PASSES


def test_load_and_stats_show_what_waits_and_what_was_computed(engine: PoolingEngine) -> None:
    for name in "abc":
        engine.add(request(name))
    load = engine.load()
    assert (load.waiting, load.queued_tokens, load.accepted) == (3, 12, ["a", "b", "c"])
    assert engine.load().accepted == []
    assert engine.stats().waiting == 3
    results(engine)
    stats = engine.stats()
    assert (stats.waiting, stats.steps, stats.admissions, stats.prompt_tokens) == (0, 2, 3, 12)
    assert engine.load().prefill_tokens_per_s > 0
    assert (engine.take_events(), engine.snapshot(), engine.reset_prefix_cache()) == ([], [], True)
