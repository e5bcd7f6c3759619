"""The engine end to end on the fake runner: tokens, ends, aborts, what it tells others."""

from collections import deque
from typing import NoReturn

import msgspec
import pytest

from mini_infer_contract.events import BlockRemoved
from mini_infer_engine.core.engine import MAX_FAILED_PASSES, Engine, RunnerFailedError
from mini_infer_engine.core.page_allocator import PoolTooSmallError
from mini_infer_engine.core.request import Output, Request, SamplingParams
from tests.support.engine_world import make_engine
from tests.support.fake_runner import EOS, VOCABULARY, expected_tokens

MAX_MODEL_LEN = 128
LAST = VOCABULARY - 1


def make_request(name: str, prompt: list[int], salt: str = "", priority: int = 0, **sampling: object) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=0, **sampling),  # type: ignore[arg-type]
        cache_salt=salt,
        priority=priority,
    )


def drain(engine: Engine, max_steps: int = 2_000) -> dict[str, list[Output]]:
    outputs: dict[str, list[Output]] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError(f"still at work after {max_steps} steps")


def run_alone(engine: Engine, request: Request) -> tuple[list[int], Output]:
    """All its tokens, and the last output."""
    engine.add(request)
    outputs = drain(engine)[request.request_id]
    assert all(output.finish_reason is None for output in outputs[:-1])
    return [token for output in outputs for token in output.token_ids], outputs[-1]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk", [0, 16, 64])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("num_pages", "page_size"), [(200, 16), (9, 16), (2, 256), (1, 128)])
def test_tokens_depend_only_on_the_request(
    depth: int, chunk: int, caching: bool, num_pages: int, page_size: int
) -> None:
    engine, _ = make_engine(
        num_pages,
        page_size,
        MAX_MODEL_LEN,
        step_depth=depth,
        long_prefill_token_threshold=chunk,
        max_num_batched_tokens=100,
        enable_prefix_caching=caching,
    )
    requests = [make_request(f"r{n}", [n % 3] * (n * 9 + 1), max_tokens=30, ignore_eos=n % 2 == 0) for n in range(12)]
    for request in requests:
        engine.add(request)
    outputs = drain(engine)
    for request in requests:
        tokens = [token for output in outputs[request.request_id] for token in output.token_ids]
        assert tokens == expected_tokens(request, MAX_MODEL_LEN)


@pytest.mark.parametrize("depth", [0, 1])
def test_outputs_finish_at_eos_stop_tokens_and_length(depth: int) -> None:
    engine, _ = make_engine(16, 16, MAX_MODEL_LEN, step_depth=depth)
    free = expected_tokens(make_request("", [5, 6], max_tokens=None, ignore_eos=True), MAX_MODEL_LEN)
    assert len(free) == MAX_MODEL_LEN - 2
    first_eos = free.index(EOS)
    stop = next(token for token in free if token != EOS)

    tokens, last = run_alone(engine, make_request("context", [5, 6], max_tokens=None, ignore_eos=True))
    assert (tokens, last.finish_reason) == (free, "length")
    tokens, last = run_alone(engine, make_request("max_tokens", [5, 6], max_tokens=3, ignore_eos=True))
    assert (tokens, last.finish_reason) == (free[:3], "length")
    tokens, last = run_alone(engine, make_request("eos", [5, 6], max_tokens=None))
    assert (tokens, last.finish_reason, last.stop_reason) == (free[: first_eos + 1], "stop", None)
    tokens, last = run_alone(engine, make_request("stop", [5, 6], max_tokens=9, ignore_eos=True, stop_token_ids=[stop]))
    assert (tokens[-1], last.finish_reason, last.stop_reason) == (stop, "stop", stop)
    every_other = list(range(LAST))
    tokens, last = run_alone(
        engine, make_request("min_tokens", [5, 6], max_tokens=9, min_tokens=4, stop_token_ids=every_other)
    )
    assert tokens[:4] == [LAST] * 4
    assert len(tokens) > 4


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_no_pass_is_launched_when_a_request_must_finish(depth: int, max_tokens: int) -> None:
    engine, runner = make_engine(16, 16, MAX_MODEL_LEN, step_depth=depth)
    engine.add(make_request("r", [1] * 40, max_tokens=max_tokens, ignore_eos=True))
    launches_at_token = []
    while engine.has_work:
        outputs = engine.step()
        launches_at_token += [len(runner.batches)] * len(outputs)
    assert len(runner.batches) == max_tokens, "a prefill, and a decode for each token but the last"
    assert launches_at_token == [min(step + depth, max_tokens) for step in range(1, max_tokens + 1)]


@pytest.mark.parametrize("depth", [0, 1])
def test_an_aborted_request_emits_nothing_and_is_freed_within_two_steps(depth: int) -> None:
    engine, _ = make_engine(16, 16, MAX_MODEL_LEN, step_depth=depth)
    engine.add(make_request("gone", [1] * 40, max_tokens=None, ignore_eos=True))
    engine.add(make_request("stays", [2] * 40, max_tokens=None, ignore_eos=True))
    for _ in range(5):
        engine.step()
    engine.abort("gone")
    engine.abort("never seen")
    outputs = engine.step() + engine.step()
    assert {output.request_id for output in outputs} == {"stays"}
    assert engine.load().running == 1
    assert engine.scheduler.kv_cache.pool.num_free == 16 - len(engine.scheduler.running[0].pages)


def test_prompt_and_answer_are_cached_when_a_chat_continues() -> None:
    engine, _ = make_engine(32, 16, MAX_MODEL_LEN)
    answer, first = run_alone(engine, make_request("one", [1] * 40, max_tokens=30, ignore_eos=True))
    assert first.num_cached_tokens == 0
    _, second = run_alone(engine, make_request("two", [1] * 40 + answer + [3] * 9, max_tokens=1))
    assert second.num_cached_tokens == 64  # 40 + 30 - the last, which was never computed, in whole blocks
    _, salted = run_alone(engine, make_request("three", [1] * 40 + answer, salt="tenant", max_tokens=1))
    assert salted.num_cached_tokens == 0


def test_load_and_stats_report_running_and_queued_work() -> None:
    engine, _ = make_engine(64, 16, MAX_MODEL_LEN, max_num_seqs=1, max_num_batched_tokens=16, step_depth=0)
    run_alone(engine, make_request("warm", [1] * 33, max_tokens=1))
    assert engine.load().accepted == ["warm"]
    engine.add(make_request("a", [1] * 48, max_tokens=4, ignore_eos=True))
    engine.add(make_request("b", [2] * 50, max_tokens=4, ignore_eos=True))
    load = engine.load()
    assert (load.running, load.waiting, load.queued_tokens, load.accepted) == (0, 2, 48 - 32 + 50, ["a", "b"])
    engine.step()
    load = engine.load()
    assert (load.running, load.waiting, load.queued_tokens, load.accepted) == (1, 1, 50, [])
    assert load.kv_usage == pytest.approx(4 / 64)
    drain(engine)
    stats = engine.stats()
    assert (stats.admissions, stats.prompt_tokens, stats.cached_prompt_tokens) == (3, 131, 32)
    assert (stats.generation_tokens, stats.decode_tokens, stats.prefill_tokens) == (9, 6, 131 - 32)
    assert stats.queue_time_s > 0


def test_refusals_name_parameter_value_and_remedy() -> None:
    with pytest.raises(PoolTooSmallError, match=r"112 tokens.*128.*--kv-cache-memory"):
        make_engine(7, 16, MAX_MODEL_LEN)
    with pytest.raises(ValueError, match="page_size is 24"):
        make_engine(7, 24, MAX_MODEL_LEN)
    engine, _ = make_engine(8, 16, MAX_MODEL_LEN)
    engine.add(make_request("twice", [1]))
    with pytest.raises(ValueError, match="'twice' is in use"):
        engine.add(make_request("twice", [1]))
    for prompt in ([], [1] * 128):
        with pytest.raises(ValueError, match=f"has {len(prompt)} prompt tokens.*128"):
            engine.add(make_request("length", prompt))
    with pytest.raises(ValueError, match="max_tokens 0"):
        engine.add(make_request("none", [1], max_tokens=0))


def sizes(thing: object, seen: set[int]) -> dict[str, int]:
    """Lengths of all containers that an object of ours holds, and of those inside; by the path to them."""
    if id(thing) in seen:
        return {}
    seen.add(id(thing))
    found = {}
    names = [*getattr(thing, "__dict__", {}), *getattr(type(thing), "__slots__", ())]
    for name in names:
        value = getattr(thing, name, None)
        if isinstance(value, (list, dict, set, deque)):
            found[name] = len(value)
            for item in value if isinstance(value, list) else ():
                found |= {f"{name}.{path}": size for path, size in sizes(item, seen).items()}
        elif type(value).__module__.startswith("mini_infer_engine"):
            found |= {f"{name}.{path}": size for path, size in sizes(value, seen).items()}
    return found


@pytest.mark.parametrize("caching", [True, False])
def test_no_buffer_grows_when_events_are_not_recorded(caching: bool) -> None:
    engine, runner = make_engine(8, 16, MAX_MODEL_LEN, record_events=False, enable_prefix_caching=caching)

    def serve(first: int) -> dict[str, int]:
        for number in range(first, first + 50):
            run_alone(engine, make_request(f"r{number}", [number % VOCABULARY] * 100, max_tokens=5, ignore_eos=True))
        runner.batches.clear()
        return sizes(engine, set())

    warm = serve(0)  # by then the cache has filled the pool
    assert serve(50) == warm
    assert "_accepted" in warm
    assert warm["_accepted"] == 0
    assert (engine.take_events(), engine.load().accepted) == ([], [])
    assert bool(engine.snapshot()) == caching


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("what", ["launch_error", "collect_error"])
def test_requests_fail_and_the_engine_goes_on_when_a_pass_fails(depth: int, what: str) -> None:
    engine, runner = make_engine(32, 16, MAX_MODEL_LEN, step_depth=depth, max_num_seqs=2)
    requested = [
        make_request(name, [index] * 40, max_tokens=20, ignore_eos=True)
        for index, name in enumerate(("a", "b", "waits"))
    ]
    for request in requested:
        engine.add(request)
    for _ in range(3):
        engine.step()
    setattr(runner, what, RuntimeError("out of luck"))
    outputs = drain(engine)
    for name in ("a", "b"):
        last = outputs[name][-1]
        assert (last.finish_reason, last.token_ids) == ("error", [])
        assert "RuntimeError: out of luck" in last.error
    waited = [token for output in outputs["waits"] for token in output.token_ids]
    assert waited == expected_tokens(requested[2], MAX_MODEL_LEN)
    pool = engine.scheduler.kv_cache.pool
    assert pool.num_free == pool.num_pages
    assert run_alone(engine, make_request("a", [0] * 40, max_tokens=20, ignore_eos=True))[0] == expected_tokens(
        requested[0], MAX_MODEL_LEN
    )


@pytest.mark.parametrize("depth", [0, 1])
def test_blocks_of_a_failed_pass_are_never_hit(depth: int) -> None:
    engine, runner = make_engine(32, 16, MAX_MODEL_LEN, step_depth=depth)
    engine.add(make_request("a", [1] * 40, max_tokens=20))
    runner.collect_error = RuntimeError("lost")
    drain(engine)
    again = make_request("again", [1] * 40, max_tokens=20)
    tokens, last = run_alone(engine, again)
    assert (tokens, last.num_cached_tokens) == (expected_tokens(again, MAX_MODEL_LEN), 0)
    stored = {key for event in engine.take_events() if isinstance(event, BlockRemoved) for key in event.block_hashes}
    assert stored, "gateways are told that the blocks are gone"


def test_the_engine_ends_when_passes_fail_repeatedly() -> None:
    engine, runner = make_engine(32, 16, MAX_MODEL_LEN)

    def fail(_: object) -> NoReturn:
        raise RuntimeError("no device")

    runner.launch = fail  # type: ignore[method-assign]
    for number in range(MAX_FAILED_PASSES - 1):
        engine.add(make_request(f"r{number}", [1] * 40))
        assert drain(engine)[f"r{number}"][-1].finish_reason == "error"
    engine.add(make_request("last", [1] * 40))
    with pytest.raises(RunnerFailedError, match=f"{MAX_FAILED_PASSES} passes.*no device"):
        engine.step()


def test_a_request_is_refused_at_once_when_the_runner_refuses_it() -> None:
    engine, _ = make_engine(8, 16, MAX_MODEL_LEN)
    with pytest.raises(ValueError, match="no token is left"):
        engine.add(make_request("r", [1], min_tokens=1, stop_token_ids=list(range(VOCABULARY))))
    assert not engine.has_work


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_resumed_request_gets_the_remaining_tokens(depth: int, temperature: float) -> None:
    requested = make_request("whole", list(range(3, 40)), max_tokens=20, min_tokens=3, presence_penalty=0.5)
    requested = msgspec.structs.replace(
        requested, noise_seed=7, sampling=msgspec.structs.replace(requested.sampling, temperature=temperature)
    )
    tokens, last = run_alone(make_engine(200, 16, MAX_MODEL_LEN, step_depth=depth)[0], requested)
    for made in range(1, len(tokens) + 1):
        resumed = msgspec.structs.replace(requested, request_id=f"from {made}", resumed_token_ids=tokens[:made])
        left, end = run_alone(make_engine(200, 16, MAX_MODEL_LEN, step_depth=depth)[0], resumed)
        assert tokens[:made] + left == tokens
        assert end.finish_reason == last.finish_reason
