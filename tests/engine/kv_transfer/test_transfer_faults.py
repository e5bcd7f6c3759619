"""Two transfer threads, in one of which something raises: the transfer ends, and the next one succeeds."""

import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from mini_infer_engine.core.request import KVSource
from mini_infer_engine.kv_transfer.protocol import events
from mini_infer_engine.kv_transfer.worker import TransferWorker
from tests.support.transfer_peers import PretendedTransport, prefill_requested, transfer_worker

LIMIT_S = 30.0
PLACES = (
    *(
        ("producer", "_producer", name)
        for name in ("_greet", "_prefill", "_grant_read", "_release", "_grant_slot", "_refuses")
    ),
    *(
        ("producer", "_producer", name)
        for name in ("give", "end", "grant", "_begin_next", "_staged_write", "_look_at", "_finish")
    ),
    *(("producer", "_producer", name) for name in ("_look_at_read", "_add_layers", "_settle", "_send")),
    *(
        ("producer", "_transport", name)
        for name in ("add_peer", "start", "staging_area", "slot_bytes", "stage", "push", "tend")
    ),
    *(
        ("consumer", "_consumer", name)
        for name in ("_connect", "_request", "_welcome", "_answer", "_read", "_grant_slots", "_place")
    ),
    *(("consumer", "_consumer", name) for name in ("_look_at", "_end_when_placed", "_succeed", "_free", "_read_ended")),
    *(("consumer", "_transport", name) for name in ("add_peer", "start", "place", "tend")),
)


class WeirdError(Exception):
    """No exception that anybody expects."""


class Pair:
    """An engine that gives and one that takes; this test is both cores."""

    def __init__(self, producer: TransferWorker, consumer: TransferWorker, address: str) -> None:
        self.producer, self.consumer, self.address = producer, consumer, address

    def ending(self, job: int, how: Any) -> events.Event:
        """How a job ends for its sequence."""
        source = KVSource(how=how, address=self.address)
        self.consumer.do(events.Take(job, prefill_requested(job).request, source, [1, 2, 3], 0, 40))
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s:
            while not self.producer.events.empty():
                self._compute(self.producer.events.get())
            while not self.consumer.events.empty():
                event = self.consumer.events.get()
                if isinstance(event, events.TransferDone | events.TransferFailed) and event.job == job:
                    return event
            time.sleep(0.001)
        raise AssertionError("the job waits for ever")

    def _compute(self, event: events.Event) -> None:
        match event:
            case events.PrefillRequest(key):
                self.producer.do(events.Send(key, 0, [4, 5, 6], 0, 40))
                self.producer.do(events.SendEnd(key, 3, [], 0))
            case events.KVRequest(key):
                self.producer.do(events.Grant(key, [4, 5, 6], 40))


@pytest.fixture(params=[False, True], ids=["direct", "staged"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with (
        transfer_worker(PretendedTransport(request.param), engine_id="producer") as (producer, address),
        transfer_worker(PretendedTransport(request.param), timeout_s=0.3, engine_id="consumer") as (consumer, _),
    ):
        yield Pair(producer, consumer, address)


@pytest.mark.parametrize(("side", "part", "method"), PLACES, ids=lambda value: value.strip("_"))
def test_threads_go_on_when_a_handler_raises(
    pair: Pair, side: str, part: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = getattr(getattr(pair, side), part)

    def raising(*_: Any, **__: Any) -> Any:
        raise WeirdError(method)

    with monkeypatch.context() as patched:
        patched.setattr(target, method, raising, raising=True)
        for job, how in ((1, "prefill"), (2, "prefix")):
            pair.ending(job, how)
    assert pair.producer.failure is None
    assert pair.consumer.failure is None
    end_s = time.monotonic() + LIMIT_S
    job = 3
    while not isinstance(pair.ending(job, "prefill"), events.TransferDone):  # on a busy machine it may be late
        job += 1
        assert time.monotonic() < end_s, "nothing is taken any more"


@pytest.mark.parametrize("error", [SystemExit(1), WeirdError("in each turn")], ids=["once", "in each turn"])
def test_peers_drop_an_engine_when_its_transfer_thread_fails(
    pair: Pair, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = count(1)
    while not isinstance(pair.ending(next(jobs), "prefill"), events.TransferDone):
        pass  # on a busy machine it may be late

    def raising(now_s: float) -> None:
        raise error

    monkeypatch.setattr(pair.producer._producer, "advance", raising)
    pair.producer._thread.join(LIMIT_S)
    assert pair.producer.failure is error
    reason = "late"
    while reason == "late":  # it may as well be given up before the loss is seen
        ending = pair.ending(next(jobs), "prefill")
        assert isinstance(ending, events.TransferFailed)
        reason = ending.reason
    assert reason in ("peer_lost", "unreachable")
    pair.producer.do(events.Send("nobody", 0, [], 0, 1))  # ignored
