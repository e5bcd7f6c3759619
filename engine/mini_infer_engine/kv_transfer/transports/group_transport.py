"""The transport of a tensor-parallel group: each rank moves its own heads, between its own pool and those of its peers.

The first rank's transfer thread decides; the others' do what it says. What they are told is a sequence's pages and
tokens: the page tables of all ranks are alike, so each works out its own bytes.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.kv_transfer.layout import KVLayout, KVMemory, Span
from mini_infer_engine.kv_transfer.protocol.wire import RankAddress, TransportAddress
from mini_infer_engine.kv_transfer.staging_slots import Area
from mini_infer_engine.kv_transfer.transport import (
    BUSY_S,
    TEND_S,
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
"""For every rank to register its pool with the transport: a GPU's whole memory takes seconds."""


class AddPeer(msgspec.Struct, frozen=True, tag=True):
    """See `Transport.add_peer`."""

    engine_id: str
    layout: KVLayout
    where: TransportAddress


class RemovePeer(msgspec.Struct, frozen=True, tag=True):
    """See `Transport.remove_peer`."""

    engine_id: str


class Start(msgspec.Struct, frozen=True, tag=True):
    """See `Transport.start`; what comes of it is told as `Moved` of this number."""

    number: int
    engine_id: str
    how: How
    span: Span


class Stage(msgspec.Struct, frozen=True, tag=True):
    """See `Transport.stage`; told of as `Start`."""

    number: int
    engine_id: str
    area: Area
    slot: int
    span: Span


class Push(msgspec.Struct, frozen=True, tag=True):
    """See `Transport.push`; told of as `Start`."""

    number: int
    engine_id: str
    area: Area
    slot: int
    their_slot: int
    span: Span


class Place(msgspec.Struct, frozen=True, tag=True):
    """See `Transport.place`; told of as `Start`."""

    number: int
    engine_id: str
    area: Area
    slot: int
    span: Span


class Opened(msgspec.Struct, frozen=True, tag=True):
    """A rank has its transport."""

    address: RankAddress


class NotOpened(msgspec.Struct, frozen=True, tag=True):
    """A rank cannot have one."""

    message: str


class Moved(msgspec.Struct, frozen=True, tag=True):
    """A rank's part of what was started has ended."""

    number: int
    progress: Progress
    num_bytes: int


Begin = Start | Stage | Push | Place
Command = AddPeer | RemovePeer | Begin

_encode = msgspec.msgpack.Encoder().encode
_decode_command = msgspec.msgpack.Decoder(Command).decode
_decode_news = msgspec.msgpack.Decoder(Opened | NotOpened | Moved).decode


def open_group_transport(
    choice: TransportChoice,
    engine_id: str,
    memory: KVMemory,
    num_ranks: int,
    router: zmq.Socket[bytes],
    fault: Callable[[], str],
) -> "GroupTransport":
    """The first rank's end, once every other rank has its own: `serve_rank` there, connected to `router`.

    `fault`: why the group is over; empty: it is not. ModelError: a rank's transport cannot work, or none came.
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
    """See `transport.Transport`."""

    def __init__(self, local: Transport, addresses: list[RankAddress], router: zmq.Socket[bytes]) -> None:
        """`addresses`: of all ranks' pools, in order."""
        self.name = local.name
        self._local, self._addresses, self._router = local, addresses, router
        self._others = [str(rank).encode() for rank in range(1, len(addresses))]
        self._numbers = itertools.count()
        self._awaited: dict[int, dict[bytes, _RankMotion]] = {}
        """By number and rank."""

    def enter_thread(self) -> None:
        """See `Transport.enter_thread`."""
        self._local.enter_thread()

    def describe(self) -> TransportAddress:
        """See `Transport.describe`."""
        return TransportAddress(self.name, self._addresses)

    def add_peer(self, engine_id: str, layout: KVLayout, where: TransportAddress) -> None:
        """See `Transport.add_peer`. A rank that cannot reach the peer says so where it is to move something."""
        self._tell(AddPeer(engine_id, layout, where))
        self._local.add_peer(engine_id, layout, where)

    def remove_peer(self, engine_id: str) -> None:
        """See `Transport.remove_peer`."""
        self._tell(RemovePeer(engine_id))
        self._local.remove_peer(engine_id)

    def tend(self) -> None:
        """See `Transport.tend`: every rank does for itself."""
        self._local.tend()

    def start(self, engine_id: str, how: How, span: Span) -> Motion:
        """See `Transport.start`."""
        local = self._local.start(engine_id, how, span)  # first, for where it fails nobody has begun
        number = next(self._numbers)
        return self._with_others(number, local, Start(number, engine_id, how, span))

    def way(self, engine_id: str, span: Span) -> Area | None:
        """See `Transport.way`. All ranks have pools alike, on machines alike."""
        return self._local.way(engine_id, span)

    def slot_bytes(self, engine_id: str, area: Area) -> int:
        """See `Transport.slot_bytes`."""
        return self._local.slot_bytes(engine_id, area)

    def stage(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        """See `Transport.stage`."""
        local, number = self._local.stage(engine_id, area, slot, span), next(self._numbers)
        return self._with_others(number, local, Stage(number, engine_id, area, slot, span))

    def push(self, engine_id: str, area: Area, slot: int, their_slot: int, span: Span) -> Motion:
        """See `Transport.push`."""
        local, number = self._local.push(engine_id, area, slot, their_slot, span), next(self._numbers)
        return self._with_others(number, local, Push(number, engine_id, area, slot, their_slot, span))

    def place(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        """See `Transport.place`."""
        local, number = self._local.place(engine_id, area, slot, span), next(self._numbers)
        return self._with_others(number, local, Place(number, engine_id, area, slot, span))

    def _with_others(self, number: int, local: Motion, command: Begin) -> Motion:
        self._tell(command)
        awaited = {rank: _RankMotion(self._hear) for rank in self._others}
        self._awaited[number] = awaited
        return Motions([local, *awaited.values()])

    def close(self) -> None:
        """See `Transport.close`."""
        self._local.close()
        self._router.close(linger=0)

    def _tell(self, command: Command) -> None:
        payload = _encode(command)
        for rank in self._others:
            self._router.send_multipart([rank, payload])

    def _hear(self) -> None:
        """What ranks have said since the last time."""
        while self._router.poll(0):
            rank, payload = self._router.recv_multipart()
            news = _decode_news(payload)
            if isinstance(news, Moved):
                awaited = self._awaited[news.number]
                motion = awaited.pop(rank)
                motion.end, motion.num_bytes = news.progress, news.num_bytes
                if not awaited:
                    del self._awaited[news.number]


class _RankMotion:
    """The part of another rank."""

    def __init__(self, hear: Callable[[], None]) -> None:
        self._hear = hear
        self.end: Progress = "busy"
        self.num_bytes = 0

    def progress(self) -> Progress:
        """See `Motion.progress`."""
        if self.end == "busy":
            self._hear()
        return self.end


def serve_rank(
    socket: zmq.Socket[bytes], choice: TransportChoice, engine_id: str, memory: KVMemory, rank: int
) -> threading.Thread:
    """Begin to do what the first rank says, in a thread of its own. `socket`: a DEALER to that rank, the thread's."""
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
    """One rank's part of what the first rank starts."""

    def __init__(self, transport: Transport, socket: zmq.Socket[bytes]) -> None:
        """`socket`: a DEALER to the first rank."""
        self._transport, self._socket = transport, socket
        self._moving: dict[int, Motion] = {}
        self._tended_s = 0.0

    def run(self) -> None:
        """For as long as the process lives: it ends with the first rank's."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Take what has come, and look at what is on its way; wait a little where there is nothing to do."""
        if not self._socket.poll(0 if self._moving else int(TEND_S * 1000)):
            if self._moving:
                time.sleep(BUSY_S)
        else:
            self._do(_decode_command(self._socket.recv()))
        for number, motion in list(self._moving.items()):
            if (progress := motion.progress()) != "busy":
                del self._moving[number]
                self._socket.send(_encode(Moved(number, progress, motion.num_bytes)))
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
