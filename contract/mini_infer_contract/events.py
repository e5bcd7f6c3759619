"""KV events and load reports: messages that an engine publishes over ZMQ and a gateway's prefix index consumes.

A message is three frames: topic, 8-byte big-endian sequence number, msgpack payload. Payloads of the topic `kv-events`
are, byte for byte, what vLLM 0.26 sends (vllm/distributed/kv_events.py); its older array forms are understood too. This
file knows neither sockets nor caches.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

EVENTS_TOPIC = b"kv-events"
LOAD_TOPIC = b"load"
MEDIUM_GPU = "GPU"
"""vLLM's name for the device's own cache, whatever the device."""
MEDIUM_HOST = "CPU"
"""vLLM's name for a tier in main memory (vllm/v1/kv_offload)."""
MEDIUM_DISK = "DISK"
"""A tier on a disk."""

SEQUENCE_BYTES = 8
REPLAY_END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
"""The sequence frame of the last reply to a replay request; its payload is empty."""

BlockHash = int | bytes
"""A block's name on the wire: 64-bit integers (vLLM's default, and ours) or raw digests."""


class EventFormatError(ValueError):
    """A payload or frame that is not what its topic promises; the sender is at fault and retrying does not help."""


def _none() -> None:
    """A default that stays on the wire: msgspec leaves out fields only where a plain default is met."""


class BlockStored(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Blocks that can be hit from now on: a chain, parents first, that hangs on `parent_block_hash` (None: a root)."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    """Token ids of all blocks, `block_size` for each."""
    block_size: int
    lora_id: int | None = msgspec.field(default_factory=_none)
    medium: str | None = msgspec.field(default_factory=_none)
    lora_name: str | None = msgspec.field(default_factory=_none)
    extra_keys: list[tuple[Any, ...] | None] | None = None
    """Facts per block that, beside tokens and parent, distinguish it: adapter name, media hashes, and, in a prompt's
    first block only, the cache salt.
    """
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Blocks that cannot be hit any more."""

    block_hashes: list[BlockHash]
    medium: str | None = msgspec.field(default_factory=_none)
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """The cache is empty."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The events of one step, in order."""

    ts: float
    """Seconds since the epoch."""
    events: list[KVEvent]
    data_parallel_rank: int | None = 0
    """vLLM's publisher puts 0 where there is no data parallelism."""


class LoadReport(msgspec.Struct, frozen=True):
    """An engine's load. It is sent when it changes, so that a gateway can route without scraping."""

    ts: float
    """Seconds since the epoch."""
    running: int
    """Requests that hold pages."""
    waiting: int
    queued_tokens: int
    """Prompt tokens that are neither cached nor computed yet."""
    kv_usage: float
    """Share of the pages in use, 0 to 1."""
    accepted: list[str] = []
    """`x-request-id`s that arrived since the last report: what a gateway need no longer add by itself."""
    role: str = ""
    """The engine's role for now (launch.Role), so that a switch is seen at once; empty if the engine does not report
    it.
    """
    prefill_tokens_per_s: float = 0.0
    """Prompt tokens computed a second, as measured lately; 0 if not measured yet."""
    transfer_bytes_per_s: float = 0.0
    """Bytes of keys and values moved a second from and to other engines, as measured lately; 0 if not measured yet."""
    kv_bytes_per_token: int = 0
    """Bytes of one token's keys and values in all layers; 0 if the engine neither sends nor receives any."""
    host_tokens_per_s: float = 0.0
    """Cached tokens a second that come back from main memory, as measured lately; 0 without such a tier or measurement.
    """
    disk_tokens_per_s: float = 0.0
    """Cached tokens a second that come back from the disk, likewise."""
    engines: int = 1
    """Copies of the model behind the endpoint, with a queue and pages of its own each; numbers are sums over them."""
    memory_bytes: int = 0
    """Anonymous main memory of the engine's processes, by which growth is noticed; 0 if it is unknown."""


class Snapshot(msgspec.Struct, frozen=True):
    """All that is cached after the batch `sequence`: applying later batches keeps a copy of it exact."""

    sequence: int
    """The last batch that is contained; -1: none was sent yet."""
    chains: list[BlockStored]
    """Parents before children."""


def wire_hash(key: bytes) -> int:
    """Our block key on the wire: its first 8 bytes, big endian, unsigned."""
    return int.from_bytes(key[:8], "big")


def block_stored(
    keys: Sequence[bytes], parent: bytes | None, token_ids: list[int], salt: str = "", medium: str = MEDIUM_GPU
) -> BlockStored:
    """The event for blocks of ours that became cached: `parent` is None for a chain that begins a prompt.

    Shaped as vLLM's scheduler shapes it: one `extra_keys` entry a block, the salt in a prompt's first block only.
    """
    extra_keys: list[tuple[Any, ...] | None] = [None] * len(keys)
    if parent is None and salt:
        extra_keys[0] = (salt,)
    return BlockStored(
        block_hashes=[wire_hash(key) for key in keys],
        parent_block_hash=None if parent is None else wire_hash(parent),
        token_ids=token_ids,
        block_size=len(token_ids) // len(keys),
        medium=medium,
        extra_keys=extra_keys,
        group_idx=0,
    )


def block_removed(keys: Sequence[bytes], medium: str = MEDIUM_GPU) -> BlockRemoved:
    """The event for blocks of ours whose last copy in this medium has gone."""
    return BlockRemoved(block_hashes=[wire_hash(key) for key in keys], medium=medium, group_idx=0)


_encoder = msgspec.msgpack.Encoder()
_batch_decoder = msgspec.msgpack.Decoder(KVEventBatch)
_load_decoder = msgspec.msgpack.Decoder(LoadReport)


def encode(message: KVEventBatch | LoadReport | Snapshot) -> bytes:
    """The msgpack payload."""
    return _encoder.encode(message)


def decode_batch(payload: bytes) -> KVEventBatch:
    """Reads a payload of the topic `kv-events`, in any form that vLLM has sent. Raises EventFormatError if it is none.

    Events of types and fields that are not known here are left out: a newer engine must not silence its older gateway.
    """
    try:
        return _batch_decoder.decode(payload)
    except msgspec.ValidationError:
        pass  # an older or a newer form, or nonsense: the slow way tells
    except _BAD_BYTES as error:
        raise EventFormatError(f"KV event batch of {len(payload)} bytes: {error}") from error
    try:
        return _decode_other_forms(payload)
    except _BAD_BYTES as error:
        raise EventFormatError(f"KV event batch of {len(payload)} bytes: {error}") from error


_BAD_BYTES = (msgspec.MsgspecError, TypeError, ValueError, RecursionError)
"""Exceptions that msgspec raises for bytes that a hostile or broken sender made (TypeError: a list as a map's key)."""

_EVENT_TYPES: dict[str, type[BlockStored | BlockRemoved | AllBlocksCleared]] = {
    event.__name__: event for event in (BlockStored, BlockRemoved, AllBlocksCleared)
}


def _decode_other_forms(payload: bytes) -> KVEventBatch:
    """Events as arrays that begin with their type (vLLM up to 0.22, SGLang), and types from the future."""
    batch = msgspec.msgpack.decode(payload)
    if not (isinstance(batch, list) and len(batch) >= 2 and isinstance(batch[1], list)):
        raise EventFormatError("not an array of [ts, events, data_parallel_rank]")
    events = []
    for event in batch[1]:
        if isinstance(event, list) and event:
            name, values = event[0], event[1:]
            names = _EVENT_TYPES[name].__struct_fields__ if name in _EVENT_TYPES else ()
            event = {"type": name, **dict(zip(names, values, strict=False))}
        if not (isinstance(event, dict) and isinstance(event.get("type"), str)):
            raise EventFormatError("an event is neither a map with a `type` nor an array that begins with one")
        if event["type"] in _EVENT_TYPES:
            events.append(event)
    # bytes stay bytes: by default a string would pass for them as base64
    return msgspec.convert([batch[0], events, *batch[2:3]], KVEventBatch, builtin_types=(bytes,))


def decode_load(payload: bytes) -> LoadReport:
    """Reads a payload of the topic `load`. Raises EventFormatError, also if a number is none that can be measured."""
    try:
        report = _load_decoder.decode(payload)
    except _BAD_BYTES as error:
        raise EventFormatError(f"load report of {len(payload)} bytes: {error}") from error
    for name in _LOAD_NUMBERS:
        # Rates of all endpoints are averaged: one infinite, negative or undefined number would be in all averages.
        if not 0 <= getattr(report, name) <= LARGEST_NUMBER:
            raise EventFormatError(f"load report: {name} is {getattr(report, name)!r}, not from 0 to {LARGEST_NUMBER}")
    return report


LARGEST_NUMBER = 2**53
"""Largest number of a load report: up to it, integers and floats are the same."""
_LOAD_NUMBERS = tuple(name for name in LoadReport.__struct_fields__ if name not in ("accepted", "role"))


class _LazySnapshot(msgspec.Struct, frozen=True):
    sequence: int
    chains: list[msgspec.Raw]


_lazy_snapshot_decoder = msgspec.msgpack.Decoder(_LazySnapshot)
_chain_decoder = msgspec.msgpack.Decoder(BlockStored)


def read_snapshot(payload: bytes) -> tuple[int, Iterator[BlockStored]]:
    """Reads the body of GET /kv_snapshot as (sequence, chains), chain by chain: two million tokens are not read at
    once.

    Raises EventFormatError, also from the iterator.
    """
    try:
        snapshot = _lazy_snapshot_decoder.decode(payload)
    except _BAD_BYTES as error:
        raise EventFormatError(f"KV snapshot of {len(payload)} bytes: {error}") from error
    return snapshot.sequence, _chains(snapshot.chains)


def _chains(chains: Sequence[msgspec.Raw]) -> Iterator[BlockStored]:
    for number, chain in enumerate(chains):
        try:
            yield _chain_decoder.decode(chain)
        except _BAD_BYTES as error:
            raise EventFormatError(f"chain {number} of a KV snapshot: {error}") from error


def merge_snapshots(sequence: int, payloads: Sequence[bytes]) -> bytes:
    """Returns the chains of several snapshots in one snapshot with this sequence number. Raises EventFormatError."""
    chains: list[msgspec.Raw] = []
    for payload in payloads:
        try:
            chains += _lazy_snapshot_decoder.decode(payload).chains
        except _BAD_BYTES as error:
            raise EventFormatError(f"KV snapshot of {len(payload)} bytes: {error}") from error
    return _encoder.encode(_LazySnapshot(sequence, chains))


def sequence_frame(sequence: int) -> bytes:
    """Returns the second frame of a message, and the body of a replay request (the first sequence number to replay)."""
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


def read_sequence(frame: bytes) -> int:
    """The number in a sequence frame."""
    if len(frame) != SEQUENCE_BYTES:
        raise EventFormatError(f"sequence frame has {len(frame)} bytes, not {SEQUENCE_BYTES}")
    return int.from_bytes(frame, "big")


def replay_frames(sequence: int, payload: bytes) -> list[bytes]:
    """One reply of a ROUTER to a replay request, without the peer's identity: what vLLM 0.26 sends."""
    return [b"", EVENTS_TOPIC, sequence_frame(sequence), payload]


REPLAY_LAST_FRAMES = (b"", b"", REPLAY_END, b"")
"""The reply that ends a replay."""


def read_replay_reply(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Reads one reply to a replay request: (sequence, payload), or None for the end marker.

    Takes the frames as a DEALER or a REQ socket receives them, from vLLM 0.26 and later and, without a topic, from
    before.
    """
    if len(frames) < 2:
        raise EventFormatError(f"replay reply has {len(frames)} frames; expected at least a sequence and a payload")
    sequence, payload = frames[-2:]
    return None if sequence == REPLAY_END else (read_sequence(sequence), payload)
