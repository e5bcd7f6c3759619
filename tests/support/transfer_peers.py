"""A transfer thread with real sockets and a pretended transport, and what peers say to it: right and mutated."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import zmq

from mini_infer_engine.core.request import Request, SamplingParams, TokenLogprobs
from mini_infer_engine.kv_transfer.consumer_jobs import KVConsumerLimits
from mini_infer_engine.kv_transfer.layout import KVLayout, KVMemory, Pool, Span, head_shares, pieces
from mini_infer_engine.kv_transfer.protocol import wire
from mini_infer_engine.kv_transfer.staging_slots import Area, StagingBuffer, blocks, blocks_for, chunks
from mini_infer_engine.kv_transfer.topology.mapped_memory import SharedPool
from mini_infer_engine.kv_transfer.topology.path_selection import Place
from mini_infer_engine.kv_transfer.topology.peer_process import ProcessName
from mini_infer_engine.kv_transfer.transport import (
    Digest,
    How,
    KnownDigest,
    Motion,
    Progress,
    Transport,
    TransportError,
)
from mini_infer_engine.kv_transfer.worker import Identity, TransferWorker

LAYOUT = KVLayout(num_layers=2, halves=2, page_size=16, num_heads=2, head_bytes=8, dtype="float32")
SLOT_BYTES = LAYOUT.page_bytes


@dataclass
class FakeDigest:
    """A digest that ends when its test says so."""

    value: int = 0
    end: Progress = "busy"

    def progress(self) -> Progress:
        """Returns the state that the test has set."""
        return self.end


WHERE = wire.TransportAddress(
    "fake",
    [
        wire.RankAddress(
            metadata=b"m",
            address=0,
            device="cpu",
            device_index=0,
            place=Place(ipc_domain="", has_rdma=False),
            staging={"host": StagingBuffer(address=0, slot_bytes=SLOT_BYTES, device="cpu", device_index=0)},
            shared=SharedPool(
                kind="shm",
                process=ProcessName(domain="d", pid=1, started=1),
                handle=b"h",
                size=1,
                offset=0,
                pool_bytes=1,
            ),
        )
    ],
)


class Done:
    """Bytes that have moved."""

    num_bytes = 1

    def progress(self) -> Progress:
        return "done"


@dataclass
class PretendedTransport:
    """Works out the bytes of each transfer, as a real one does, and moves none."""

    is_staged: bool = False
    name: str = "fake"
    peers: dict[str, tuple[KVLayout, wire.TransportAddress]] = field(default_factory=dict)

    def enter_thread(self) -> None: ...

    def describe(self) -> wire.TransportAddress:
        return WHERE

    def add_peer(self, engine_id: str, layout: KVLayout, where: wire.TransportAddress) -> None:
        for share in head_shares(LAYOUT, 0, layout):
            assert where.ranks[share.their_rank].metadata is not None
        self.peers[engine_id] = layout, where

    def remove_peer(self, engine_id: str) -> None:
        self.peers.pop(engine_id, None)

    def tend(self) -> None: ...

    def start(self, engine_id: str, how: How, span: Span) -> Motion:
        pieces(LAYOUT, self._layout(engine_id), span)
        return Done()

    def staging_area(self, engine_id: str, span: Span) -> Area | None:
        return "host" if self.is_staged else None

    def slot_bytes(self, engine_id: str, area: Area, pool: Pool = "pages") -> int:
        return min(SLOT_BYTES, self.peers[engine_id][1].ranks[0].staging[area].slot_bytes)

    def stage(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        blocks(LAYOUT, 0, self._layout(engine_id), span)
        return Done()

    def push(self, engine_id: str, area: Area, slot: int, their_slot: int, span: Span) -> Motion:
        return self.stage(engine_id, area, slot, span)

    def place(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        """What is put in place lies in the pages of the job and in one slot, whatever the peer says."""
        theirs = self._layout(engine_id)
        assert len(chunks(theirs, LAYOUT, span, 1 << 20)) == 1
        assert 0 <= span.begin < span.end <= len(span.our_pages) * LAYOUT.page_size
        blocks_for(theirs, LAYOUT, 0, span)
        return Done()

    def _layout(self, engine_id: str) -> KVLayout:
        if engine_id not in self.peers:
            raise TransportError("not connected")
        return self.peers[engine_id][0]

    def digest(self, span: Span, consumer: KVLayout | None = None) -> Digest:
        return KnownDigest(0)

    def close(self) -> None: ...


def party(engine_id: str, role: str = "unified") -> wire.Party:
    return wire.Party(version=wire.VERSION, engine_id=engine_id, role=role, weights="w", layout=LAYOUT, where=WHERE)


@contextmanager
def transfer_worker(
    transport: PretendedTransport, timeout_s: float = 60.0, engine_id: str = "me"
) -> Iterator[tuple[TransferWorker, str]]:
    """A running transfer thread, and the address of its port."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.set(zmq.LINGER, 0)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    memory = KVMemory(address=0, num_pages=64, device="cpu", device_index=0, layout=LAYOUT)
    identity = Identity(engine_id=engine_id, weights="w", memory=memory)
    limits = KVConsumerLimits(lease_s=30.0, timeout_s=timeout_s)
    worker = TransferWorker(identity, cast("Transport", transport), router, "unified", limits)
    worker.start()
    try:
        yield worker, f"tcp://127.0.0.1:{port}"
    finally:
        worker.stop()
        context.destroy(linger=0)


def prefill_requested(job: int) -> wire.PrefillRequested:
    sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    request = Request(request_id="x#1", prompt_token_ids=[job % 40] * 40, sampling=sampling)
    return wire.PrefillRequested(job, request, [7, 8, 9], 0, 30.0)


FROM_CONSUMER: tuple[wire.FromConsumer, ...] = (
    wire.Hello(party("peer")),
    prefill_requested(1),
    wire.KVRequested(1, [1] * 40, "", "", 0, 30.0),
    wire.Renew([1], 30.0),
    wire.Release([1]),
    wire.SlotGranted(1, 0, 8),
)
LOGPROBS = [TokenLogprobs(3, -0.5, 1, [3], [-0.5])]
FROM_PRODUCER: tuple[wire.FromProducer, ...] = (
    wire.Welcome(party("peer")),
    wire.Refused("no"),
    wire.Accepted(1, 10, 5.0, 5.0),
    wire.SlotRequested(1, 0, "host"),
    wire.Written(1, 0, 0, 16, (0, 2)),
    wire.AllWritten(1),
    wire.Prefilled(1, 3, LOGPROBS, 0, 100),
    wire.KVGranted(1, [4, 5, 6], 40, 30.0, False),
    wire.Failed(1, "role", "no"),
    wire.Released([1]),
)
HOSTILE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**31,
    2**62,
    2**64 - 1,
    0.0,
    -1.0,
    1e300,
    float("nan"),
    float("inf"),
    "",
    "x" * 100_000,
    b"\xff",
    [],
    [-1],
    [0] * 1000,
    [[]],
    {},
    {"a": 1},
)


def mutations(message: object) -> Iterator[bytes]:
    """The message with one field, at any depth, that is missing or has a hostile value."""
    whole = msgspec.to_builtins(message, builtin_types=(bytes,))
    for path in _paths(whole):
        for value in HOSTILE:
            yield msgspec.msgpack.encode(_with(whole, path, value))
        yield msgspec.msgpack.encode(_without(whole, path))


def _paths(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*before, key)
            yield from _paths(inner, (*before, key))
    elif isinstance(value, list) and value:
        yield (*before, 0)
        yield from _paths(value[0], (*before, 0))


def _with(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = _with(value[path[0]], path[1:], new)
    return copied


def _without(value: Any, path: tuple[Any, ...]) -> Any:
    copied = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1:
        del copied[path[0]]
    else:
        copied[path[0]] = _without(value[path[0]], path[1:])
    return copied
