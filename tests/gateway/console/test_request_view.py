"""A recorded request as a row of the list, and as a timeline."""

from dataclasses import asdict, replace

import pytest

from mini_infer_gateway.console.record_ring import Record
from mini_infer_gateway.console.request_log import RequestLog
from mini_infer_gateway.console.request_view import request_detail, request_row
from mini_infer_gateway.console.viewer import Viewer
from tests.gateway.console.traces import ask, decision


def latest(log: RequestLog) -> Record:
    return next(log.records(Viewer(everything=True)))


def test_a_row_has_the_times_of_all_phases_when_a_request_has_ended() -> None:
    log = RequestLog()
    ask(log, "one")
    row = request_row(latest(log), 1000.0, everything=True)
    assert (row.id, row.model, row.status, row.outcome, row.engine, row.reason) == (
        *("one", "m", 200, "ok"),
        *("e1", "cached_prefix"),
    )
    assert (row.time, row.duration_s, row.first_byte_s, row.queue_s) == (1100.0, 1.0, 0.5, 0.2)
    assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens, row.attempts) == (64, 32, 7, 1)


def test_the_timeline_names_the_tiers_when_a_hit_is_not_on_the_device() -> None:
    log = RequestLog()
    trace = log.begin({"request_id": "two", "path": "/v1/chat/completions"}, 10.0)
    for host, disk in ((16, 0), (0, 32)):
        trace.sent(replace(decision("e1", 64), host_tokens=host, disk_tokens=disk), 0.0, 10.2)
        trace.failed("connect", 10.3)
    trace.sent(replace(decision("e2", 64), host_tokens=16, disk_tokens=32), 0.0, 10.9)
    trace.ended({"outcome": "ok", "status": 200}, 12.0)
    sent = [step.detail for step in request_detail(latest(log), 0.0, everything=True).timeline if step.step == "sent"]
    begin = "chosen by tie, 64 tokens cached (exact)"
    assert sent == [
        f"{begin}, 16 of them in main memory",
        f"{begin}, 32 of them on the disk",
        f"{begin}, 16 of them in main memory, 32 of them on the disk",
    ]


def test_the_timeline_has_every_attempt_when_one_failed() -> None:
    log = RequestLog()
    trace = log.begin({"request_id": "two", "path": "/v1/chat/completions"}, 10.0)
    trace.tokenized({}, 5, 10.1)
    trace.sent(decision("e1"), 0.0, 10.2)
    trace.failed("connect", 10.3)
    trace.sent(decision("e2"), 0.5, 10.9)
    trace.answered(11.0)
    trace.ended({"outcome": "ok", "status": 200}, 12.0)
    detail = request_detail(latest(log), 0.0, everything=True)
    steps = [(step.at_s, step.step, step.engine) for step in detail.timeline]
    assert steps == [
        (0.0, "arrived", ""),
        (pytest.approx(0.1), "tokenized", ""),
        (pytest.approx(0.2), "sent", "e1"),
        (pytest.approx(0.3), "failed", ""),
        (pytest.approx(0.4), "queued", ""),
        (pytest.approx(0.9), "sent", "e2"),
        (pytest.approx(1.0), "first_byte", ""),
        (pytest.approx(2.0), "ended", ""),
    ]
    assert detail.timeline[3].detail == "connect"
    assert detail.request.attempts == 2


def test_the_first_byte_is_that_of_the_first_attempt_when_a_stream_went_on_elsewhere() -> None:
    log = RequestLog()
    trace = log.begin({"request_id": "three", "path": "/v1/chat/completions"}, 10.0)
    trace.tokenized({}, 5, 10.1)
    trace.sent(decision("e1"), 0.0, 10.2)
    trace.answered(10.4)
    trace.failed("stream_cut", 11.0)
    trace.sent(decision("e2"), 0.0, 11.1)
    trace.ended({"outcome": "ok", "status": 200}, 12.0)
    detail = request_detail(latest(log), 0.0, everything=True)
    assert (detail.request.first_byte_s, detail.request.engine) == (0.4, "e2")
    assert [step.step for step in detail.timeline] == [
        *("arrived", "tokenized", "sent", "first_byte", "failed", "sent", "ended"),
    ]


def test_a_request_that_was_refused_has_no_attempt_when_it_was_never_sent() -> None:
    log = RequestLog()
    log.begin({"request_id": "four", "path": "/v1/chat/completions"}, 10.0).ended({"status": 404}, 10.1)
    detail = request_detail(latest(log), 0.0, everything=True)
    assert [step.step for step in detail.timeline] == ["arrived", "ended"]
    assert (detail.request.attempts, detail.request.first_byte_s, detail.request.engine) == (0, None, "")


def test_no_engine_is_named_when_a_viewer_may_not_see_engines() -> None:
    log = RequestLog(keeps_texts=True)
    ask(log, "mine", key="a", error="the endpoint e1 failed")
    detail = request_detail(latest(log), 0.0, everything=False)
    assert (detail.request.engine, detail.request.reason, detail.request.error) == ("", "", "")
    assert "e1" not in repr(asdict(detail))
    assert detail.timeline[-1].detail == "ok"
    assert detail.text == "text of mine"
