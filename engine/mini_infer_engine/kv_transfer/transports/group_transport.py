"""Implements the transport of a tensor-parallel group: each rank moves its own heads, between its pool and its peers'
pools.

The first rank's transfer thread decides, and sends commands to those of the other ranks. A command has a sequence's
pages and tokens: the page tables of all ranks are equal, so each rank computes its own bytes.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.kv_transfer.layout import KVLayout, KVMemory, Pool, Span
from mini_infer_engine.kv_transfer.protocol.wire import RankAddress, TransportAddress
from mini_infer_engine.kv_transfer.staging_slots import Area
from mini_infer_engine.kv_transfer.transport import (
    BUSY_S,
    TEND_S,
    Digest,
    DigestSum,
    How,
    Motion,
    Motions,
    Progress,
    Transport,
    TransportChoice,
)
from mini_infer_engine.kv_transfer.transports.open_transport import open_transport

log = logging.getLogger(__name__)

_OPEN_S = 120.0
"""Seconds for every rank to register its pool with the transport: a GPU's whole memory takes seconds."""


class AddPeer(msgspec.Struct, frozen=True, tag=True):
    """Calls `Transport.add_peer` on another rank."""

    engine_id: str
    layout: KVLayout
    where: TransportAddress


class RemovePeer(msgspec.Struct, frozen=True, tag=True):
    """Calls `Transport.remove_peer` on another rank."""

    engine_id: str


class Start(msgspec.Struct, frozen=True, tag=True):
    """Calls `Transport.start` on another rank, which reports the end as `Moved` with the same number."""

    number: int
    engine_id: str
    how: How
    span: Span


class Stage(msgspec.Struct, frozen=True, tag=True):
    """Calls `Transport.stage` on another rank, which reports the end as `Moved` with the same number."""

    number: int
    engine_id: str
    area: Area
    slot: int
    span: Span


class Push(msgspec.Struct, frozen=True, tag=True):
    """Calls `Transport.push` on another rank, which reports the end as `Moved` with the same number."""

    number: int
    engine_id: str
    area: Area
    slot: int
    their_slot: int
    span: Span


class Place(msgspec.Struct, frozen=True, tag=True):
    """Calls `Transport.place` on another rank, which reports the end as `Moved` with the same number."""

    number: int
    engine_id: str
    area: Area
    slot: int
    span: Span


class ComputeDigest(msgspec.Struct, frozen=True, tag=True):
    """Calls `Transport.digest` on another rank, which reports the end as `Digested` with the same number."""

    number: int
    span: Span
    consumer: KVLayout | None


class Opened(msgspec.Struct, frozen=True, tag=True):
    """Reports that a rank has opened its transport."""

    address: RankAddress


class NotOpened(msgspec.Struct, frozen=True, tag=True):
    """Reports that a rank cannot open its transport."""

    message: str


class Moved(msgspec.Struct, frozen=True, tag=True):
    """Reports that a rank's part of a motion has ended."""

    number: int
    progress: Progress
    num_bytes: int


class Digested(msgspec.Struct, frozen=True, tag=True):
    """Reports a rank's part of a digest."""

    number: int
    progress: Progress
    value: int


Begin = Start | Stage | Push | Place
Command = AddPeer | RemovePeer | Begin | ComputeDigest

_encode = msgspec.msgpack.Encoder().encode
_decode_command = msgspec.msgpack.Decoder(Command).decode
_decode_news = msgspec.msgpack.Decoder(Opened | NotOpened | Moved | Digested).decode


def open_group_transport(
    choice: TransportChoice,
    engine_id: str,
    memory: KVMemory,
    num_ranks: int,
    router: zmq.Socket[bytes],
    fault: Callable[[], str],
) -> "GroupTransport":
    """Opens the first rank's end, and waits until every other rank has opened its own: `serve_rank` there, connected to
    `router`.

    `fault` returns the reason why the group has ended, or an empty string while it runs. Raises ModelError if a rank's
    transport cannot work, or is not open in time.
    """
    local = open_transport(choice, engine_id, memory)
    addresses: dict[int, RankAddress] = {0: local.describe().ranks[0]}
    end_s = time.monotonic() + _OPEN_S
    while len(addresses) < num_ranks:
        if (reason := fault()) or time.monotonic() > end_s:
            missing = sorted(set(range(num_ranks)) - set(addresses))
            raise ModelError(reason or f"KV transfer: ranks {missing} have no transport after {_OPEN_S:.0f} s")
        if router.poll(100):
            sender, payload = router.recv_multipart()
            answer = _decode_news(payload)
            if isinstance(answer, NotOpened):
                raise ModelError(f"rank {sender.decode()}: {answer.message}")
            if isinstance(answer, Opened):
                addresses[int(sender)] = answer.address
    return GroupTransport(local, [addresses[rank] for rank in range(num_ranks)], router)


class GroupTransport:
    """Implements `transport.Transport` for the first rank of a group."""

    def __init__(self, local: Transport, addresses: list[RankAddress], router: zmq.Socket[bytes]) -> None:
        """Wraps the first rank's own transport. `addresses` are those of all ranks' pools, in order."""
        self.name = local.name
        self._local, self._addresses, self._router = local, addresses, router
        self._others = [str(rank).encode() for rank in range(1, len(addresses))]
        self._numbers = itertools.count()
        self._awaited: dict[int, dict[bytes, _RankMotion]] = {}
        """Unfinished motions and digests of other ranks, by number and rank."""

    def enter_thread(self) -> None:
        """Prepares the thread for the first rank's transport."""
        self._local.enter_thread()

    def describe(self) -> TransportAddress:
        """Returns the addresses of all ranks."""
        return TransportAddress(self.name, self._addresses)

    def add_peer(self, engine_id: str, layout: KVLayout, where: TransportAddress) -> None:
        """Connects all ranks to a peer. Another rank that cannot reach it reports that by its first motion, which
        fails.
        """
        self._report(AddPeer(engine_id, layout, where))
        self._local.add_peer(engine_id, layout, where)

    def remove_peer(self, engine_id: str) -> None:
        """Disconnects all ranks from a peer."""
        self._report(RemovePeer(engine_id))
        self._local.remove_peer(engine_id)

    def tend(self) -> None:
        """Frees resources of this rank; the other ranks do so by themselves."""
        self._local.tend()

    def start(self, engine_id: str, how: How, span: Span) -> Motion:
        """Begins the transfer on all ranks."""
        local = self._local.start(engine_id, how, span)  # first, for where it fails nobody has begun
        number = next(self._numbers)
        return self._with_others(local, Start(number, engine_id, how, span))

    def staging_area(self, engine_id: str, span: Span) -> Area | None:
        """Returns the first rank's choice, which holds for all ranks: their pools and machines are alike."""
        return self._local.staging_area(engine_id, span)

    def slot_bytes(self, engine_id: str, area: Area, pool: Pool = "pages") -> int:
        """Returns the bytes of a slot, which are the same on all ranks."""
        return self._local.slot_bytes(engine_id, area, pool)

    def stage(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        """Gathers tokens into the slot on all ranks."""
        local, number = self._local.stage(engine_id, area, slot, span), next(self._numbers)
        return self._with_others(local, Stage(number, engine_id, area, slot, span))

    def push(self, engine_id: str, area: Area, slot: int, their_slot: int, span: Span) -> Motion:
        """Writes the slot of all ranks."""
        local, number = self._local.push(engine_id, area, slot, their_slot, span), next(self._numbers)
        return self._with_others(local, Push(number, engine_id, area, slot, their_slot, span))

    def place(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        """Copies the slot into pages on all ranks."""
        local, number = self._local.place(engine_id, area, slot, span), next(self._numbers)
        return self._with_others(local, Place(number, engine_id, area, slot, span))

    def digest(self, span: Span, consumer: KVLayout | None = None) -> Digest:
        """Computes the digest on all ranks, whose parts add up."""
        local, number = self._local.digest(span, consumer), next(self._numbers)
        return DigestSum([local, *self._await(ComputeDigest(number, span, consumer))])

    def _with_others(self, local: Motion, command: Begin) -> Motion:
        return Motions([local, *self._await(command)])

    def _await(self, command: Begin | ComputeDigest) -> "list[_RankMotion]":
        self._report(command)
        awaited = self._awaited[command.number] = {rank: _RankMotion(self._receive) for rank in self._others}
        return list(awaited.values())

    def close(self) -> None:
        """Closes the first rank's transport, and the socket to the others."""
        self._local.close()
        self._router.close(linger=0)

    def _report(self, command: Command) -> None:
        payload = _encode(command)
        for rank in self._others:
            self._router.send_multipart([rank, payload])

    def _receive(self) -> None:
        """Handles all reports of other ranks, without waiting."""
        while self._router.poll(0):
            rank, payload = self._router.recv_multipart()
            news = _decode_news(payload)
            if isinstance(news, Moved | Digested):
                awaited = self._awaited[news.number]
                motion = awaited.pop(rank)
                motion.end = news.progress
                if isinstance(news, Moved):
                    motion.num_bytes = news.num_bytes
                else:
                    motion.value = news.value
                if not awaited:
                    del self._awaited[news.number]


class _RankMotion:
    """Another rank's part of a motion or of a digest."""

    def __init__(self, receive: Callable[[], None]) -> None:
        self._receive = receive
        self.end: Progress = "busy"
        self.num_bytes = 0
        self.value = 0

    def progress(self) -> Progress:
        """Returns the state that the rank has reported."""
        if self.end == "busy":
            self._receive()
        return self.end


def serve_rank(
    socket: zmq.Socket[bytes], choice: TransportChoice, engine_id: str, memory: KVMemory, rank: int
) -> threading.Thread:
    """Begins to execute the first rank's commands in a thread. `socket` is a DEALER to that rank, which the thread
    owns.
    """
    thread = threading.Thread(
        target=_serve, args=(socket, choice, engine_id, memory, rank), name="kv-transfer", daemon=True
    )
    thread.start()
    return thread


def _serve(socket: zmq.Socket[bytes], choice: TransportChoice, engine_id: str, memory: KVMemory, rank: int) -> None:
    try:
        transport = open_transport(choice, engine_id, memory, rank)
        transport.enter_thread()
        socket.send(_encode(Opened(transport.describe().ranks[0])))
    except Exception as error:
        socket.send(_encode(NotOpened(str(error))))
        return
    RankMover(transport, socket).run()


class RankMover:
    """Executes the first rank's commands on another rank."""

    def __init__(self, transport: Transport, socket: zmq.Socket[bytes]) -> None:
        """Wraps the rank's transport. `socket` is a DEALER to the first rank."""
        self._transport, self._socket = transport, socket
        self._moving: dict[int, Motion] = {}
        self._digests: dict[int, Digest] = {}
        self._tended_s = 0.0

    def run(self) -> None:
        """Executes commands until the process ends, which it does with the first rank's."""
        while True:
            self.iterate()

    def iterate(self) -> None:
        """Receives at most one command, and polls motions in flight. It waits a little if there is nothing to do."""
        is_busy = bool(self._moving or self._digests)
        if not self._socket.poll(0 if is_busy else int(TEND_S * 1000)):
            if is_busy:
                time.sleep(BUSY_S)
        else:
            self._do(_decode_command(self._socket.recv()))
        for number, motion in list(self._moving.items()):
            if (progress := motion.progress()) != "busy":
                del self._moving[number]
                self._socket.send(_encode(Moved(number, progress, motion.num_bytes)))
        for number, digest in list(self._digests.items()):
            if (progress := digest.progress()) != "busy":
                del self._digests[number]
                self._socket.send(_encode(Digested(number, progress, digest.value)))
        if (now_s := time.monotonic()) >= self._tended_s + TEND_S:
            self._tended_s = now_s
            self._transport.tend()

    def _do(self, command: Command) -> None:
        match command:
            case RemovePeer(engine_id):
                self._transport.remove_peer(engine_id)
            case AddPeer(engine_id, layout, where):
                try:
                    self._transport.add_peer(engine_id, layout, where)
                except Exception as error:
                    log.warning("KV transfer: %s", error)  # and what is to move there fails
            case ComputeDigest(number, span, consumer):
                try:
                    self._digests[number] = self._transport.digest(span, consumer)
                except Exception:
                    log.exception("KV transfer: a digest cannot be computed")
                    self._socket.send(_encode(Digested(number, "failed", 0)))
            case _:
                try:
                    self._moving[command.number] = self._begin(command)
                except Exception as error:
                    log.warning("KV transfer: %s", error)
                    self._socket.send(_encode(Moved(command.number, "failed", 0)))

    def _begin(self, command: Begin) -> Motion:
        match command:
            case Start(_, engine_id, how, span):
                return self._transport.start(engine_id, how, span)
            case Stage(_, engine_id, area, slot, span):
                return self._transport.stage(engine_id, area, slot, span)
            case Push(_, engine_id, area, slot, their_slot, span):
                return self._transport.push(engine_id, area, slot, their_slot, span)
            case Place(_, engine_id, area, slot, span):
                return self._transport.place(engine_id, area, slot, span)
