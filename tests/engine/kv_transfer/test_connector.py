"""The core's end of KV transfer: what pins pages and for how long, and what no peer's event may do to the engine."""

import math
import random
import time
from typing import Any

import msgspec
import pytest

from mini_infer_engine.core import engine as engine_module
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import KVSource, Request, SamplingParams, TokenLogprobs
from mini_infer_engine.kv_transfer.connector import TransferConnector
from mini_infer_engine.kv_transfer.protocol import events
from mini_infer_engine.kv_transfer.protocol.leases import MAX_LEASE_S
from tests.support.connected_engine import FROM_PEER, PEER, FakeWorker, connect, request, steps
from tests.support.engine_world import make_engine

PAGES, PAGE_SIZE, MAX_MODEL_LEN = 10, 16, 150


def make(**more: Any) -> tuple[Engine, FakeWorker, TransferConnector]:
    engine, _ = make_engine(PAGES, PAGE_SIZE, MAX_MODEL_LEN)
    return engine, *connect(engine, **more)


def last_of(engine: Engine, one: Request, count: int = 20) -> Any:
    engine.add(one)
    return next(output for output in steps(engine, count) if output.finish_reason)


def expire(connector: TransferConnector) -> None:
    """All retained prompts' leases end now."""
    for key in connector._retained_leases.ends_s:
        connector._retained_leases.ends_s[key] = 0.0


# -- Retained prompts


def test_idle_engine_waits_when_retained_prompts_pin_the_pages_that_a_prompt_needs() -> None:
    engine, _, connector = make(retained_share=1.0)
    assert last_of(engine, request("retained", 100, retains_kv=True)).kv_transfer_params
    engine.add(request("next", 100))
    assert steps(engine) == []
    assert engine.only_receives
    assert engine.has_work
    expire(connector)
    assert not engine.only_receives
    assert [output.finish_reason for output in steps(engine)] == ["length"]
    assert connector.stats.pinned_pages == 0
    assert engine.scheduler.kv_cache.pool.usage == 0


def test_smaller_prompt_runs_when_a_larger_one_waits_for_pinned_pages() -> None:
    engine, _, connector = make(retained_share=1.0)
    last_of(engine, request("retained", 100, retains_kv=True))
    engine.add(request("large", 100))
    engine.add(request("small", 20))
    assert [output.request_id for output in steps(engine)] == ["small"]
    expire(connector)
    assert [output.request_id for output in steps(engine)] == ["large"]


def test_prompt_ends_with_an_error_when_peers_pin_its_pages_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MAX_KEPT_OUT_S", 0.0)
    engine, _, _ = make(retained_share=1.0)
    last_of(engine, request("retained", 100, retains_kv=True))
    engine.add(request("next", 100))
    [output] = steps(engine)
    assert (output.request_id, output.finish_reason) == ("next", "error")
    assert not engine.has_work
    assert last_of(engine, request("small", 20)).finish_reason == "length"


def test_pinned_pages_count_as_usage_in_load_and_stats() -> None:
    engine, _, _ = make(retained_share=1.0)
    last_of(engine, request("retained", 100, retains_kv=True))
    assert engine.load().kv_usage == pytest.approx(0.7)
    assert engine.stats().kv_usage == pytest.approx(0.7)
    assert engine.stats().kv_transfer.pinned_pages == 7


def test_oldest_retained_prompt_is_released_when_the_share_is_used_up() -> None:
    engine, worker, connector = make(retained_share=0.5)
    for name in ("a", "b", "c"):
        assert last_of(engine, request(name, 30, retains_kv=True)).kv_transfer_params
    assert connector.stats.pinned_pages == 4
    assert connector.stats.leases_expired == 1
    for name in ("a", "c"):
        requested = events.KVRequest(f"p/{name}", list(request(name, 30).prompt_token_ids), "", name, 0)
        worker.send_news(requested)
        steps(engine, 2)
    assert [type(command) for command in worker.done] == [events.Refuse, events.Grant]
    worker.send_news(events.JobEnded("p/c"), events.JobEnded("p/a"))
    steps(engine, 1)
    assert connector.stats.pinned_pages == 2  # b's


def test_prompt_larger_than_the_share_is_not_retained() -> None:
    engine, _, connector = make(retained_share=0.5)
    assert last_of(engine, request("large", 100, retains_kv=True)).kv_transfer_params is None
    assert connector.stats.pinned_pages == 0


def test_retained_lease_is_bounded_when_the_configured_lease_is_long() -> None:
    engine, _, connector = make(lease_s=3600.0)
    last_of(engine, request("retained", 30, retains_kv=True))
    [end_s] = connector._retained_leases.ends_s.values()
    assert end_s <= time.monotonic() + MAX_LEASE_S


# -- Prompts that come from another engine


def test_fallback_waits_when_a_hung_peer_may_still_write_to_its_first_pages() -> None:
    engine, worker, connector = make()
    engine.add(request("r", 100, kv_source=FROM_PEER))
    steps(engine, 1)
    worker.send_news(events.TransferFailed(0, "late", f"{PEER} is late"))
    assert [output.kv_fallback for output in steps(engine)] == ["late"]
    assert connector.stats.pinned_pages == 7
    engine.add(request("small", 20))
    assert [output.request_id for output in steps(engine)] == ["small"]
    worker.send_news(events.Settled(0))
    assert [output.finish_reason for output in steps(engine)] == ["length"]
    assert engine.scheduler.kv_cache.pool.usage == 0


def test_no_new_transfer_is_requested_when_a_peer_has_not_settled_a_failed_one() -> None:
    engine, worker, _ = make()
    engine.add(request("r", 20, kv_source=FROM_PEER))
    steps(engine, 1)
    worker.send_news(events.TransferFailed(0, "late", ""))
    steps(engine, 3)
    engine.add(request("s", 20, kv_source=FROM_PEER))
    assert [output.kv_fallback for output in steps(engine) if output.kv_fallback] == ["peer_hangs"]
    assert [type(command) for command in worker.done] == [events.Take]
    worker.send_news(events.Settled(0))
    engine.add(request("t", 20, kv_source=FROM_PEER))
    steps(engine, 2)
    assert [type(command) for command in worker.done] == [events.Take, events.Take]
    assert engine.stats().kv_transfer.fallbacks == {"peer_hangs": 1}


@pytest.mark.parametrize(
    "copied",
    [
        events.TransferDone(0, 100, 1 << 31),
        events.TransferDone(0, 100, 3, [TokenLogprobs(3, -0.1, 1, [3], [-0.1])]),
        events.TransferDone(0, 100, 3, num_cached=10**6),
        events.TransferDone(0, 10**6, 3),
        events.TransferDone(9, 100, 3),
    ],
)
def test_engine_goes_on_when_a_peer_sends_a_first_token_that_cannot_be(copied: events.TransferDone) -> None:
    engine, worker, _ = make(vocab_size=50)
    engine.add(request("r", 100, kv_source=FROM_PEER))
    engine.add(request("own", 20))
    outputs = engine.step()
    worker.send_news(copied, *([events.TransferFailed(0, "late", "")] if copied.job else []), events.Settled(0))
    outputs += steps(engine)
    assert {output.request_id: output.finish_reason for output in outputs if output.finish_reason} == {
        "r": "length",
        "own": "length",
    }
    assert engine.scheduler.kv_cache.pool.usage == 0


@pytest.mark.parametrize("logprob", [math.nan, math.inf])
def test_prompt_is_computed_here_when_log_probabilities_are_no_numbers(logprob: float) -> None:
    engine, worker, _connector = make(vocab_size=50)
    requested = request("r", 100, kv_source=FROM_PEER)
    requested = msgspec.structs.replace(requested, sampling=msgspec.structs.replace(requested.sampling, logprobs=1))
    engine.add(requested)
    steps(engine, 1)
    worker.send_news(events.TransferDone(0, 100, 3, [TokenLogprobs(3, logprob, 1, [3], [logprob])]), events.Settled(0))
    assert [output.kv_fallback for output in engine.step()] == ["bad_message"]


# -- Prompts of other engines


def request_of(num_tokens: int = 40, **more: Any) -> Request:
    return request("theirs", num_tokens, **more)


def prefill_request(key: str, one: Request) -> events.PrefillRequest:
    return events.PrefillRequest(key, one, 0, 16)


def test_engine_goes_on_when_a_refused_remote_prompt_is_cancelled_before_the_step() -> None:
    engine, worker, _ = make()
    worker.send_news(prefill_request("p/0", request_of(200)), events.JobEnded("p/0"))
    assert steps(engine, 3) == []
    assert not engine.has_work


def test_idle_engine_waits_when_the_only_slot_has_a_state_that_a_peer_is_given() -> None:
    engine, _ = make_engine(PAGES, PAGE_SIZE, MAX_MODEL_LEN, max_num_seqs=1)
    worker, _ = connect(engine, has_states=True)
    worker.send_news(prefill_request("p/0", request_of(40)))
    steps(engine, 4)
    given = [command for command in worker.done if isinstance(command, events.Send)]
    [state] = [command for command in given if command.pool == "states"]
    assert (state.pages, state.begin, state.end) == ([0], 0, 1)
    worker.send_news(*(events.SendDone(give.key, give.serial) for give in given if give is not state))
    engine.add(request("next", 40))
    assert steps(engine, 3) == []
    assert engine.only_receives
    worker.send_news(events.SendDone(state.key, state.serial))
    assert [output.finish_reason for output in steps(engine)] == ["length"]
    assert engine.scheduler.slots.num_free == 1


def test_slot_stays_pinned_when_a_failed_transfer_of_its_state_is_not_settled() -> None:
    engine, _ = make_engine(PAGES, PAGE_SIZE, MAX_MODEL_LEN, max_num_seqs=2)
    worker, _ = connect(engine, has_states=True)
    engine.add(request("r", 40, kv_source=FROM_PEER))
    steps(engine, 1)
    [take] = [command for command in worker.done if isinstance(command, events.Take)]
    worker.send_news(events.TransferFailed(take.job, "late", f"{PEER} is late"))
    assert [output.finish_reason for output in steps(engine) if output.finish_reason] == ["length"]
    assert engine.scheduler.slots.num_free == 1
    worker.send_news(events.Settled(take.job))
    steps(engine, 2)
    assert engine.scheduler.slots.num_free == 2


def test_remote_prompt_is_refused_when_it_is_too_long() -> None:
    engine, worker, _ = make()
    worker.send_news(prefill_request("p/0", request_of(200)))
    steps(engine, 3)
    assert [type(command) for command in worker.done] == [events.Refuse]


def test_remote_prompt_is_refused_when_its_tokens_fit_no_array() -> None:
    engine, worker, _ = make()
    one = msgspec.structs.replace(request_of(), prompt_token_ids=[-1, 1 << 40])
    worker.send_news(prefill_request("p/0", one))
    steps(engine, 3)
    assert [type(command) for command in worker.done] == [events.Refuse]
    assert engine.stats().kv_transfer.faults == 1


def test_a_remote_prompt_makes_one_token_and_retains_nothing() -> None:
    engine, worker, connector = make()
    greedy = request_of(40, max_tokens=50, retains_kv=True, kv_source=KVSource(address="tcp://third:1", how="prefill"))
    worker.send_news(prefill_request("p/0", greedy))
    assert steps(engine) == []
    kinds = [type(command) for command in worker.done]
    assert kinds.count(events.SendEnd) == 1
    assert events.Take not in kinds
    worker.send_news(*(events.SendDone(one.key, one.serial) for one in worker.done if isinstance(one, events.Send)))
    steps(engine)
    assert connector.stats.pinned_pages == 0
    assert not engine.has_work


def test_peers_requests_are_validated_like_clients() -> None:
    def check(one: Request) -> None:
        raise ValueError("temperature")

    engine, worker, _ = make(check=check)
    worker.send_news(prefill_request("p/0", request_of()))
    steps(engine, 3)
    [refusal] = worker.done
    assert isinstance(refusal, events.Refuse)
    assert (refusal.reason, refusal.message) == ("refused_request", "temperature")


# -- Prefixes in lower tiers


class Eager(random.Random):
    """Ends every copy at the next look."""

    def random(self) -> float:
        return 0.0


def make_with_main_memory() -> tuple[Engine, FakeWorker, Request]:
    """An engine that has a prompt in main memory alone."""
    engine, _ = make_engine(4 * PAGES, PAGE_SIZE, MAX_MODEL_LEN, num_tier_pages=(80, 0), draw=Eager(0))
    worker, _ = connect(engine)
    wanted = request("wanted", 100)
    for one in (wanted, *(request(name, 100) for name in "bdfhjln")):
        last_of(engine, one)
        while engine.write_behind():
            pass
    return engine, worker, wanted


def asked_for(wanted: Request, name: str = "p/0") -> events.KVRequest:
    return events.KVRequest(name, [*wanted.prompt_token_ids, 1], "", "", 0)


def test_prefix_is_loaded_before_it_is_granted_when_it_is_in_main_memory() -> None:
    engine, worker, wanted = make_with_main_memory()
    worker.send_news(asked_for(wanted))
    steps(engine, 1)
    assert worker.done == []
    while not worker.done:
        engine.write_behind()  # as an engine does that has no requests
        if engine.has_work:
            steps(engine, 1)
    (grant,) = worker.done
    assert isinstance(grant, events.Grant)
    assert (grant.num_tokens, len(grant.pages)) == (96, 6)
    assert engine.stats().kv_tiers.tiers["host"].prefetch_used_tokens == 96
    worker.send_news(events.JobEnded("p/0"))
    steps(engine, 1)
    assert engine.stats().kv_transfer.pinned_pages == 0


def test_prefix_is_granted_as_far_as_it_is_on_the_device_when_nothing_can_be_loaded() -> None:
    engine, worker, wanted = make_with_main_memory()
    for _ in range(20):
        engine._tiers._host_tier.cost.measured(96, 1000.0)  # type: ignore[union-attr]  # it has tiers
    worker.send_news(asked_for(wanted))
    steps(engine, 2)
    (grant,) = worker.done
    assert isinstance(grant, events.Grant)
    assert grant.num_tokens == 0


def test_job_that_ends_while_its_prefix_is_loaded_is_not_granted() -> None:
    engine, worker, wanted = make_with_main_memory()
    worker.send_news(asked_for(wanted), events.JobEnded("p/0"))
    for _ in range(5):
        steps(engine, 1)
        engine.write_behind()
    assert worker.done == []
    assert engine.stats().kv_transfer.pinned_pages == 0


# -- Faults

EVENTS = (
    prefill_request("p/0", request_of()),
    events.KVRequest("p/1", [1, 2, 3], "", "", 0),
    events.JobEnded("p/1"),
    events.SendDone("p/0", 0),
    events.TransferDone(0, 40, 3),
    events.TransferFailed(0, "late", ""),
    events.Settled(0),
)


class WeirdError(Exception):
    """No exception that anybody expects."""


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_engine_goes_on_when_an_event_is_about_a_job_that_there_is_not(event: events.Event) -> None:
    engine, worker, _ = make()
    worker.send_news(event, event)
    assert last_of(engine, request("own", 20)).finish_reason == "length"


@pytest.mark.parametrize("kind", [type(event) for event in EVENTS], ids=lambda kind: kind.__name__)
def test_engine_goes_on_when_handling_an_event_raises(
    kind: "type[events.Event]", monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, worker, connector = make()
    handle = connector._handle

    def raising(event: events.Event, work: Any) -> None:
        if isinstance(event, kind):
            raise WeirdError(kind.__name__)
        handle(event, work)

    monkeypatch.setattr(connector, "_handle", raising)
    engine.add(request("r", 40, kv_source=FROM_PEER))
    steps(engine, 1)
    worker.send_news(*EVENTS)
    ended = {output.request_id for output in steps(engine) if output.finish_reason}
    assert last_of(engine, request("own", 20)).finish_reason == "length"
    assert engine.stats().kv_transfer.faults == 1
    assert "r" in ended


def test_engine_computes_everything_itself_when_the_transfer_thread_has_failed() -> None:
    engine, worker, _connector = make(retained_share=1.0)
    last_of(engine, request("retained", 20, retains_kv=True))
    engine.add(request("r", 40, max_tokens=3, kv_source=FROM_PEER))
    worker.send_news(prefill_request("p/0", request_of(20)))
    steps(engine, 1)
    worker.failure = WeirdError("the thread")
    outputs = steps(engine)
    assert [output.kv_fallback for output in outputs if output.kv_fallback] == ["transfer_failed"]
    assert {output.request_id for output in outputs if output.finish_reason} == {"r"}
    engine.add(request("later", 40, kv_source=FROM_PEER))
    assert [output.finish_reason for output in steps(engine)] == ["length"]
    stats = engine.stats().kv_transfer
    assert stats.has_failed
    assert stats.fallbacks["transfer_failed"] == 1
    assert stats.open_leases == 0
    assert stats.pinned_pages == 3  # of the prompt to which its peer may still write
    assert not engine.has_work


def test_only_its_own_job_fails_when_a_read_names_invalid_tokens() -> None:
    engine, worker, _ = make()
    worker.send_news(events.KVRequest("p/0", [-1] * 40, "", "", 0), events.KVRequest("p/1", [1] * 40, "", "", 0))
    steps(engine, 3)
    assert [(type(command), command.key) for command in worker.done if not isinstance(command, events.Take)] == [
        (events.Refuse, "p/0"),
        (events.Grant, "p/1"),
    ]


def test_a_retained_prompt_keeps_its_sampling_parameters() -> None:
    engine, _, _ = make()
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    one = msgspec.structs.replace(request("retained", 30, retains_kv=True), sampling=sampling)
    params = last_of(engine, one).kv_transfer_params
    assert params["remote_request_id"] == "retained"
