import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer_contract import events
from mini_infer_contract.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventFormatError,
    KVEventBatch,
    LoadReport,
)
from tests.contract.make_golden_events import BATCHES, GOLDEN
from tests.prompts.conversations import quick

VLLM: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text())
OURS = "0.26.0"
CASES = [(version, name) for version, cases in VLLM.items() for name in BATCHES if name in cases]


def expected(name: str) -> KVEventBatch:
    ts, made, rank = BATCHES[name]
    types = {"BlockStored": BlockStored, "BlockRemoved": BlockRemoved, "AllBlocksCleared": AllBlocksCleared}
    known = [
        types[kind](**{key: value for key, value in fields.items() if key in types[kind].__struct_fields__})
        for kind, fields in made
    ]
    return KVEventBatch(ts, known, rank)


@pytest.mark.parametrize("name", BATCHES)
def test_kv_events_are_encoded_as_by_vllm(name: str) -> None:
    assert events.encode(expected(name)).hex() == VLLM[OURS][name]


@pytest.mark.parametrize(("version", "name"), CASES)
def test_kv_events_of_every_vllm_version_are_decoded(version: str, name: str) -> None:
    batch = events.decode_batch(bytes.fromhex(VLLM[version][name]))
    expected_events = expected(name)
    assert (batch.ts, batch.data_parallel_rank) == (expected_events.ts, expected_events.data_parallel_rank)
    assert [type(event) for event in batch.events] == [type(event) for event in expected_events.events]
    for event, full in zip(batch.events, expected_events.events, strict=True):
        # An old version lacks some fields; those it has are right.
        for field in ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"):
            assert getattr(event, field, None) == getattr(full, field, None)
        if version in ("0.20.0", OURS, "0.33.0"):
            assert event == full


def test_our_kv_events_have_the_fields_of_vllms() -> None:
    keys = [bytes([index]) * 16 for index in (1, 2)]
    stored = events.block_stored(keys, None, list(range(32)), salt="tenant")
    assert stored.block_hashes == [0x0101010101010101, 0x0202020202020202]
    assert (stored.parent_block_hash, stored.block_size, stored.medium, stored.group_idx) == (None, 16, "GPU", 0)
    assert stored.extra_keys == [("tenant",), None]
    child = events.block_stored(keys[1:], keys[0], list(range(16)), salt="tenant")
    assert (child.parent_block_hash, child.extra_keys) == (0x0101010101010101, [None])
    assert events.block_removed(keys).block_hashes == stored.block_hashes


def test_vllms_published_frames_and_replays_are_read() -> None:
    for version in ("0.20.0", OURS):
        replies = [[bytes.fromhex(frame) for frame in frames] for frames in VLLM[version]["replies"]]
        read = [events.read_replay_reply(frames) for frames in replies]
        assert [read[0][0], read[1][0], read[2]] == [1, 2, None]
        assert isinstance(events.decode_batch(read[1][1]).events[0], AllBlocksCleared)
        # A REQ socket takes the empty first frame away.
        assert [events.read_replay_reply(frames[1:]) for frames in replies] == read
    assert replies[0] == events.replay_frames(1, bytes.fromhex(VLLM[OURS]["removed"]))
    assert replies[2] == list(events.REPLAY_LAST_FRAMES)
    topic, sequence, payload = (bytes.fromhex(frame) for frame in VLLM[OURS]["published"][2])
    assert (topic, sequence) == (events.EVENTS_TOPIC, events.sequence_frame(2))
    assert events.decode_batch(payload).events == [AllBlocksCleared()]


def test_unknown_kv_events_and_fields_are_ignored() -> None:
    known = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "invented": {"deep": [1]}}
    for unknown in ({"type": "BlockMoved", "to": "moon"}, ["BlockMoved", [1]], ["AllBlocksCleared", "reason"]):
        batch = events.decode_batch(msgspec.msgpack.encode([1.0, [unknown, known], 0, "a field of tomorrow"]))
        assert batch.events[-1] == BlockRemoved(block_hashes=[1], medium="GPU")
        assert len(batch.events) == 1 + (unknown[0] == "AllBlocksCleared" if isinstance(unknown, list) else 0)


@pytest.mark.parametrize(
    "message",
    [
        None,
        {"ts": 1.0},
        [1.0],
        ["now", []],
        [1.0, {}],
        [1.0, [7]],
        [1.0, [[]]],
        [1.0, [[["BlockRemoved"], [1]]]],
        [1.0, [{"block_hashes": [1]}]],
        [1.0, [{"type": 1}]],
        [1.0, [{"type": "BlockRemoved"}]],
        [1.0, [{"type": "BlockRemoved", "block_hashes": ["AAAA"], "medium": None}]],
        [1.0, [["BlockRemoved", "AAAA"]]],
        [1.0, [["BlockStored", [1], None, [1, -1.5], 16]]],
        [1.0, [{"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": []}]],
    ],
)
def test_decoding_raises_event_format_error_when_a_batch_is_malformed(message: Any) -> None:
    with pytest.raises(EventFormatError):
        events.decode_batch(msgspec.msgpack.encode(message))


@quick
@given(st.binary(max_size=60), st.sampled_from(sorted(VLLM)), st.sampled_from(sorted(BATCHES)), st.data())
def test_decoding_any_bytes_raises_nothing_but_event_format_error(
    noise: bytes, version: str, name: str, data: st.DataObject
) -> None:
    whole = bytes.fromhex(VLLM[version][name])
    at = data.draw(st.integers(0, len(whole)))
    for payload in (noise, whole[:at] + noise, whole[:at] + noise + whole[at + len(noise) :]):
        for decode in (events.decode_batch, events.decode_load, lambda payload: list(events.read_snapshot(payload)[1])):
            try:
                decode(payload)
            except EventFormatError:
                continue


@pytest.mark.parametrize("payload", [b"\x93" * 100_000, b"\x92\xcb" + b"\0" * 8 + b"\x91" * 100_000, b"\x81\x90\x01"])
def test_decoding_raises_event_format_error_for_deep_nesting(payload: bytes) -> None:
    with pytest.raises(EventFormatError):
        events.decode_batch(payload)


hashes = st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=32)
stored = st.builds(
    BlockStored,
    block_hashes=st.lists(hashes, max_size=3),
    parent_block_hash=st.none() | hashes,
    token_ids=st.lists(st.integers(0, 2**32 - 1)),
    block_size=st.integers(1, 256),
    lora_id=st.none() | st.integers(0, 9),
    medium=st.none() | st.text(max_size=4),
    lora_name=st.none() | st.text(max_size=4),
    extra_keys=st.none() | st.lists(st.none() | st.tuples(st.text(max_size=4)), max_size=3),
)
removed = st.builds(BlockRemoved, block_hashes=st.lists(hashes), medium=st.none() | st.text(max_size=4))


@quick
@given(st.lists(stored | removed | st.just(AllBlocksCleared()), max_size=4), st.none() | st.integers(0, 7))
def test_kv_event_batches_survive_encoding(made: list[Any], rank: int | None) -> None:
    batch = KVEventBatch(1.25, made, rank)
    assert events.decode_batch(events.encode(batch)) == batch
    as_arrays = [[type(event).__name__, *msgspec.structs.astuple(event)] for event in made]
    assert events.decode_batch(msgspec.msgpack.encode([1.25, as_arrays, rank])) == batch


@quick
@given(st.lists(stored), st.integers(-1, 2**62))
def test_snapshots_and_load_reports_survive_encoding(chains: list[BlockStored], sequence: int) -> None:
    read_sequence, read_chains = events.read_snapshot(events.encode(events.Snapshot(sequence, chains)))
    assert (read_sequence, list(read_chains)) == (sequence, chains)
    load = events.LoadReport(1.0, running=2, waiting=0, queued_tokens=77, kv_usage=0.5, accepted=["a"])
    assert events.decode_load(events.encode(load)) == load


@pytest.mark.parametrize("value", [-1, 2**54, 2**63, math.inf, -math.inf, math.nan, 1e308])
@pytest.mark.parametrize("name", [name for name in LoadReport.__struct_fields__ if name not in ("accepted", "role")])
def test_a_load_report_is_refused_when_one_of_its_numbers_is_no_measurement(name: str, value: float) -> None:
    is_float = LoadReport.__annotations__[name] is float
    fields = {"ts": 1.0, "running": 0, "waiting": 0, "queued_tokens": 0, "kv_usage": 0.5, name: value}
    payload = msgspec.msgpack.encode(fields | ({name: float(value)} if is_float else {}))
    with pytest.raises(EventFormatError):
        events.decode_load(payload)


def test_sequence_frames_survive_encoding() -> None:
    assert events.read_sequence(events.sequence_frame(2**40)) == 2**40
    with pytest.raises(EventFormatError, match="3 bytes"):
        events.read_sequence(b"abc")
    with pytest.raises(EventFormatError, match="1 frames"):
        events.read_replay_reply([b""])
