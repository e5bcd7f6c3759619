"""What in a message of another engine must fit together, or fit the job that it is about."""

import math
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from mini_infer_engine.core.request import KVSource, Request, SamplingParams, TokenLogprobs
from mini_infer_engine.kv_transfer.layout import KVLayout
from mini_infer_engine.kv_transfer.protocol import wire
from mini_infer_engine.kv_transfer.protocol.events import Take
from mini_infer_engine.kv_transfer.protocol.handshake import handshake_refusal, party_fault
from mini_infer_engine.kv_transfer.protocol.message_checks import (
    first_token_fault,
    granted_fault,
    kv_request_fault,
    prefill_request_fault,
    written_fault,
)
from tests.support.transfer_peers import LAYOUT, party

REQUEST = Request(request_id="x", prompt_token_ids=[1] * 40, sampling=SamplingParams())
TAKE = Take(1, REQUEST, KVSource(address="tcp://a:1", how="prefill"), [1, 2, 3], 16, 40)


@pytest.mark.parametrize(
    ("begin", "end", "layers", "is_right"),
    [
        (16, 40, (0, 2), True),
        (32, 40, (1, 2), True),
        (0, 16, (0, 2), False),
        (15, 32, (0, 2), False),
        (16, 41, (0, 2), False),
        (32, 32, (0, 2), False),
        (32, 16, (0, 2), False),
        (16, 32, (0, 3), False),
        (16, 32, (1, 1), False),
        (16, 32, (2, 1), False),
    ],
)
def test_a_written_message_is_refused_when_it_is_outside_its_job(
    begin: int, end: int, layers: tuple[int, int], is_right: bool
) -> None:
    assert (written_fault(wire.Written(1, 0, begin, end, layers), TAKE, LAYOUT) == "") is is_right


@pytest.mark.parametrize(
    ("first_token", "pages", "is_right"), [(0, 3, True), (39, 3, True), (40, 3, False), (0, 2, False), (0, 0, False)]
)
def test_a_prefill_request_is_refused_when_its_pages_are_too_few(first_token: int, pages: int, is_right: bool) -> None:
    request_of = wire.PrefillRequested(1, REQUEST, [1] * pages, first_token, 1.0)
    assert (prefill_request_fault(request_of, LAYOUT) == "") is is_right


def test_a_read_is_refused_when_it_names_missing_tokens() -> None:
    assert kv_request_fault(wire.KVRequested(1, [1], "", "", 0, 1.0)) == ""
    assert kv_request_fault(wire.KVRequested(1, [1], "", "", 1, 1.0))
    assert kv_request_fault(wire.KVRequested(1, [], "", "", 0, 1.0))
    assert granted_fault(wire.KVGranted(1, [1], 16, 1.0), LAYOUT, 40) == ""
    assert granted_fault(wire.KVGranted(1, [], 0, 1.0), LAYOUT, 40) == ""
    assert granted_fault(wire.KVGranted(1, [1], 17, 1.0), LAYOUT, 40)


WITH_STATES = replace(
    LAYOUT, states=KVLayout(num_layers=2, halves=1, page_size=1, num_heads=3, head_bytes=512, dtype="states")
)


@pytest.mark.parametrize(
    ("granted", "layout", "is_right"),
    [
        (wire.KVGranted(1, [1], 16, 1.0, state_slot=4), WITH_STATES, True),
        (wire.KVGranted(1, [], 0, 1.0), WITH_STATES, True),
        (wire.KVGranted(1, [1], 16, 1.0), WITH_STATES, False),
        (wire.KVGranted(1, [1, 2, 3], 40, 1.0, state_slot=4), WITH_STATES, False),
        (wire.KVGranted(1, [1], 16, 1.0, state_slot=4), LAYOUT, False),
    ],
)
def test_a_grant_is_refused_when_its_recurrent_state_is_missing_or_too_far_ahead(
    granted: wire.KVGranted, layout: KVLayout, is_right: bool
) -> None:
    assert (granted_fault(granted, layout, 40) == "") is is_right


@pytest.mark.parametrize(
    ("begin", "end", "layers", "layout", "is_right"),
    [
        (0, 1, (0, 2), WITH_STATES, True),
        (0, 1, (1, 2), WITH_STATES, True),
        (0, 2, (0, 2), WITH_STATES, False),
        (1, 2, (0, 2), WITH_STATES, False),
        (0, 1, (0, 3), WITH_STATES, False),
        (0, 1, (1, 1), WITH_STATES, False),
        (0, 1, (0, 2), LAYOUT, False),
    ],
)
def test_a_written_state_is_refused_when_it_is_no_part_of_the_sequences_own(
    begin: int, end: int, layers: tuple[int, int], layout: KVLayout, is_right: bool
) -> None:
    written = wire.Written(1, 0, begin, end, layers, "states")
    assert (written_fault(written, TAKE, layout) == "") is is_right


def test_a_prefill_request_is_refused_when_it_has_no_slot_for_the_recurrent_state() -> None:
    requested = wire.PrefillRequested(1, REQUEST, [1, 2, 3], 0, 1.0, 5)
    assert prefill_request_fault(requested, WITH_STATES) == ""
    assert "state_slot" in prefill_request_fault(requested, LAYOUT)
    assert "state_slot" in prefill_request_fault(replace(requested, state_slot=None), WITH_STATES)


@pytest.mark.parametrize(
    ("token_id", "logprobs", "is_right"),
    [
        (3, [TokenLogprobs(3, -0.5, 1, [3, 4], [-0.5, -1.0])], True),
        (3, [TokenLogprobs(3, -math.inf, 1, [3], [-0.5])], True),
        (50, [TokenLogprobs(3, -0.5, 1, [3], [-0.5])], False),
        (3, [], False),
        (3, [TokenLogprobs(3, -0.5, 1, [3], [])], False),
        (3, [TokenLogprobs(3, -0.5, 1, [50], [-0.5])], False),
        (3, [TokenLogprobs(-1, -0.5, 1, [3], [-0.5])], False),
        (3, [TokenLogprobs(3, math.nan, 1, [3], [-0.5])], False),
        (3, [TokenLogprobs(3, -0.5, 1, [3], [math.inf])], False),
    ],
)
def test_a_first_token_is_refused_when_it_is_outside_the_vocabulary(
    token_id: int, logprobs: list[TokenLogprobs], is_right: bool
) -> None:
    assert (first_token_fault(token_id, logprobs, SamplingParams(logprobs=2), vocab_size=50) == "") is is_right


def test_log_probabilities_come_only_when_they_are_requested() -> None:
    assert first_token_fault(3, [], SamplingParams(), vocab_size=50) == ""
    assert first_token_fault(3, [TokenLogprobs(3, -0.5, 1, [3], [-0.5])], SamplingParams(), vocab_size=50)


@pytest.mark.parametrize(
    "changes", [{"copies": 2}, {"tp_size": 3, "copies": 2}, {"tp_size": 2}, {"head_bytes": 7}], ids=str
)
def test_party_is_refused_when_its_layout_contradicts_itself(changes: dict[str, Any]) -> None:
    wrong = replace(party("b"), layout=replace(LAYOUT, **changes))
    assert party_fault(wrong)
    assert handshake_refusal(party("a"), wrong)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("copies", 0),
        ("tp_size", 0),
        ("page_size", 0),
        ("page_size", 1 << 60),
        ("num_heads", -1),
        ("num_layers", 1 << 40),
        ("head_bytes", 0),
        ("scale_bytes", -2),
        ("halves", 3),
        ("dtype", "x" * 100),
    ],
)
def test_layout_is_no_message_when_a_size_is_out_of_bounds(field: str, value: Any) -> None:
    whole = msgspec.to_builtins(wire.Hello(party("b")), builtin_types=(bytes,))
    whole["party"]["layout"][field] = value
    with pytest.raises(msgspec.ValidationError, match=field):
        wire.decode_from_consumer(msgspec.msgpack.encode(whole))


@pytest.mark.parametrize("lease_s", [0.0, -1.0, math.nan, math.inf, 1e9])
def test_lease_is_no_message_when_it_is_out_of_bounds(lease_s: float) -> None:
    with pytest.raises(msgspec.ValidationError, match="lease_s"):
        wire.decode_from_consumer(wire.encode(wire.Renew([1], lease_s)))


@pytest.mark.parametrize("slot", [-1, 0, 7, 16, 1 << 40])
def test_slot_is_no_message_when_it_is_not_for_others(slot: int) -> None:
    with pytest.raises(msgspec.ValidationError, match="slot"):
        wire.decode_from_consumer(wire.encode(wire.SlotGranted(1, 0, slot)))


def test_a_hello_is_refused_when_a_rank_has_no_address() -> None:
    whole = msgspec.to_builtins(wire.Hello(party("b")), builtin_types=(bytes,))
    whole["party"]["where"]["ranks"] = []
    with pytest.raises(msgspec.ValidationError, match="ranks"):
        wire.decode_from_consumer(msgspec.msgpack.encode(whole))
