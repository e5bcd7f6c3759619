"""Faults are counted, logged now and then, and with a traceback only where they are our own."""

import logging

import msgspec
import pytest

from mini_infer_engine.core.faults import FaultLog


def undecodable() -> Exception:
    try:
        msgspec.msgpack.decode(b"\xd9\x01\xff")
    except Exception as error:
        return error
    raise AssertionError


@pytest.mark.parametrize("error", [msgspec.ValidationError("x"), undecodable(), RecursionError()])
def test_malformed_message_gets_one_line_when_it_is_recorded(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    faults = FaultLog()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            faults.record("a message", error)
    assert faults.num_faults == 3
    assert [record.exc_info for record in caplog.records] == [None]


def test_own_fault_gets_its_traceback_when_it_is_recorded(caplog: pytest.LogCaptureFixture) -> None:
    faults = FaultLog()
    faults.record("handling a message", KeyError("x"))
    assert caplog.records[0].exc_info


def test_places_stay_bounded_when_peers_come_and_go() -> None:
    faults = FaultLog()
    for number in range(3000):
        faults.record(f"a message of {number}", msgspec.ValidationError("x"))
    assert len(faults._logged_s) <= 1000
