"""Two transfer threads, in one of which something raises: the transfer ends, and the next one succeeds."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from mini_infer_engine.core.request import KVSource
from mini_infer_engine.kv_transfer.protocol import events
from mini_infer_engine.kv_transfer.worker import TransferWorker
from tests.support.transfer_peers import PretendedTransport, prefill_wanted, transfer_worker

LIMIT_S = 30.0
PLACES = (
    *(("giver", "_giver", name) for name in ("_greet", "_prefill", "_let_read", "_release", "_lend", "_refuses")),
    *(("giver", "_giver", name) for name in ("give", "end", "grant", "_begin_next", "_gift", "_look_at", "_finish")),
    *(("giver", "_giver", name) for name in ("_look_at_read", "_add_layers", "_settle", "_send")),
    *(("giver", "_transport", name) for name in ("add_peer", "start", "way", "slot_bytes", "stage", "push", "tend")),
    *(("taker", "_taker", name) for name in ("_connect", "_ask", "_welcome", "_answer", "_read", "_lend", "_place")),
    *(("taker", "_taker", name) for name in ("_look_at", "_end_when_placed", "_succeed", "_free", "_read_ended")),
    *(("taker", "_transport", name) for name in ("add_peer", "start", "place", "tend")),
)


class WeirdError(Exception):
    """No exception that anybody expects."""


class Pair:
    """An engine that gives and one that takes; this test is both cores."""

    def __init__(self, giver: TransferWorker, taker: TransferWorker, address: str) -> None:
        self.giver, self.taker, self.address = giver, taker, address

    def ending(self, job: int, how: Any) -> events.Event:
        """How a job ends for its sequence."""
        source = KVSource(how=how, address=self.address)
        self.taker.do(events.Take(job, prefill_wanted(job).request, source, [1, 2, 3], 0, 40))
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s:
            while not self.giver.events.empty():
                self._compute(self.giver.events.get())
            while not self.taker.events.empty():
                event = self.taker.events.get()
                if isinstance(event, events.Taken | events.NotTaken) and event.job == job:
                    return event
            time.sleep(0.001)
        raise AssertionError("the job waits for ever")

    def _compute(self, event: events.Event) -> None:
        match event:
            case events.PrefillAsked(key):
                self.giver.do(events.Give(key, 0, [4, 5, 6], 0, 40))
                self.giver.do(events.GiveEnd(key, 3, [], 0))
            case events.KVAsked(key):
                self.giver.do(events.Grant(key, [4, 5, 6], 40))


@pytest.fixture(params=[False, True], ids=["direct", "staged"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with (
        transfer_worker(PretendedTransport(request.param), engine_id="giver") as (giver, address),
        transfer_worker(PretendedTransport(request.param), timeout_s=0.3, engine_id="taker") as (taker, _),
    ):
        yield Pair(giver, taker, address)


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
    assert pair.giver.failure is None
    assert pair.taker.failure is None
    end_s = time.monotonic() + LIMIT_S
    job = 3
    while not isinstance(pair.ending(job, "prefill"), events.Taken):  # on a busy machine it may be late
        job += 1
        assert time.monotonic() < end_s, "nothing is taken any more"


@pytest.mark.parametrize("error", [SystemExit(1), WeirdError("in each turn")], ids=["once", "in each turn"])
def test_peers_lose_an_engine_whose_thread_fails(
    pair: Pair, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(pair.ending(1, "prefill"), events.Taken)

    def raising(now_s: float) -> None:
        raise error

    monkeypatch.setattr(pair.giver._giver, "advance", raising)
    pair.giver._thread.join(LIMIT_S)
    assert pair.giver.failure is error
    ending = pair.ending(2, "prefill")
    assert isinstance(ending, events.NotTaken)
    assert ending.reason in ("peer_lost", "unreachable")
    pair.giver.do(events.Give("nobody", 0, [], 0, 1))  # ignored
