"""Keeps the prefix index and the load ledger in step with one endpoint: ZMQ events, replay, snapshot, prompt assets.

The owner cancels it when the endpoint is removed. If the events of an endpoint stop while it still answers, its blocks
are kept in the index for a while; if it does not answer, they are removed.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from mini_infer_contract.events import (
    LOAD_TOPIC,
    BlockStored,
    EventFormatError,
    KVEvent,
    KVEventBatch,
    decode_batch,
    decode_load,
    read_replay_reply,
    read_sequence,
    read_snapshot,
    sequence_frame,
)
from mini_infer_contract.launch import KV_SNAPSHOT_PATH, MODELS_PATH, READY_PATH, Endpoint
from mini_infer_contract.peer_auth import PEER_HEADER, PeerSecret
from mini_infer_gateway.fleet.breaker import Evidence
from mini_infer_gateway.fleet.load import LoadLedger
from mini_infer_gateway.fleet.unread_bytes import UnreadBytes, UnreadBytesError
from mini_infer_gateway.http.fetch_memory import FetchMemory
from mini_infer_gateway.http.upstream import (
    BrokenConnectionError,
    ConnectError,
    Upstream,
    UpstreamError,
    UpstreamTimeoutError,
)
from mini_infer_gateway.index.event_sequencer import Sequencer, Verdict
from mini_infer_gateway.index.prefix_index import PrefixIndex, slices
from mini_infer_gateway.prompts.tokenizers import NoPromptAssetsError, Tokenizers
from mini_infer_process import zmq_limits
from mini_infer_process.curve import secure_client

FIRST_BACKOFF_S = 0.2
LONGEST_BACKOFF_S = 10.0
FOREIGN_BACKOFF_S = 60.0
"""Seconds until a server without prompt assets is queried again: one with assets may replace it at the same address."""
SNAPSHOT_TIMEOUT_S = 10.0
WHOLE_SNAPSHOT_TIMEOUT_S = 60.0
SNAPSHOT_BYTES = 128 << 20
"""Bytes of snapshots that are read at once, unless the gateway's memory says otherwise: one of two million tokens has a
tenth of them.
"""
REPLAY_TIMEOUT_S = 2.0
RECONNECT_PAUSE_S = 0.2
LONGEST_PAUSE_S = 30.0
"""Longest pause in seconds between two connections to an endpoint whose events are invalid."""
ALIVE_TIMEOUT_S = 1.0
HEARTBEAT_MS = 5000
"""Milliseconds between heartbeats; a dead node closes no connection, but three missed heartbeats do."""
SLICE_S = 0.002
"""Seconds for which events are applied before the event loop runs again."""

_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSALS

log = logging.getLogger(__name__)


class PeerRefusedError(Exception):
    """The endpoint and the gateway disagree on the proof of membership; only the operator of both can resolve that."""


class EndpointSubscriber:
    """The subscriber to one endpoint."""

    def __init__(
        self,
        endpoint: Endpoint,
        index: PrefixIndex,
        ledger: LoadLedger,
        tokenizers: Tokenizers,
        upstream: Upstream,
        count_gap: Callable[[str], None],
        learned: Callable[[Evidence], bool],
        clock: Callable[[], float],
        stale_ttl_s: float,
        secret: PeerSecret | None = None,
        snapshots: FetchMemory | None = None,
    ) -> None:
        """`secret` proves membership of the endpoint's service, if `Endpoint.peer_auth` requires that. `snapshots` is
        shared by all subscribers.
        """
        self._snapshots = snapshots or FetchMemory(SNAPSHOT_BYTES)
        self._endpoint = endpoint
        self._index, self._ledger, self._tokenizers, self._upstream = index, ledger, tokenizers, upstream
        self._count_gap, self._learned, self._clock = count_gap, learned, clock
        self._secret = secret
        self._sequencer = Sequencer()
        self._assets_due = asyncio.Event()
        self._stale_ttl_s = stale_ttl_s
        self.stale_until_s = 0.0
        """Time until which the blocks of events that have stopped are still trusted."""
        self._breathed_s = 0.0
        self.live = False
        """True if events arrive and the index includes what was before them."""
        self.refused = False
        """True if the handshake with its event socket failed the last time: the keys of both sides differ."""
        self.lag_s = 0.0
        """Seconds from the sending to the arrival of the last event or load report, by the clocks of two machines."""
        self.report_s: float | None = None
        """Time of the last load report over the present event socket; None if there was none."""
        self.role = ""
        """The role that the endpoint reports over the present socket; empty if it reports none."""
        self.tokenizer_queried = False
        """True once the endpoint has been queried for its prompt assets, whatever the result."""
        self.assets_revision = ""
        """Revision of its prompt assets; empty if none is known."""
        self.resumes = False
        """True if it is an engine of this project, which can continue a stream that another engine began."""
        self.model = ServedModel()
        """The served model, as the endpoint reports it."""

    @property
    def events_state(self) -> str:
        """The state of its event socket in one word; "" if it has none."""
        if not self._endpoint.events:
            return ""
        return "live" if self.live else "refused" if self.refused else "waiting"

    async def run(self) -> None:
        """Follows the endpoint's prompt assets and events until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_assets())
            if self._endpoint.events:
                tasks.create_task(self._follow_events())

    def suspect(self) -> None:
        """Handles a failed connection: the server at the address may soon be a different one, with an empty cache."""
        self._assets_due.set()
        if not self.live:
            self._drop_blocks()

    async def _follow_assets(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            self._assets_due.clear()
            pause_s: float | None = None
            try:
                self.model = await self._fetch_model()
                self.assets_revision, self.resumes = await self._tokenizers.fetch(self._endpoint, self.assets_revision)
                if not self.resumes:
                    pause_s = FOREIGN_BACKOFF_S
                elif self.model.max_model_len is None:  # it tells how it tokenises before its model is loaded
                    pause_s = backoff_s
                    backoff_s = min(LONGEST_BACKOFF_S, 2 * backoff_s)
                else:
                    backoff_s = FIRST_BACKOFF_S
            except NoPromptAssetsError as error:
                log.info("%s is routed by load only: %s", self._endpoint.name, error)
                pause_s = FOREIGN_BACKOFF_S
            except UpstreamError:
                pause_s = backoff_s
                backoff_s = min(LONGEST_BACKOFF_S, 2 * backoff_s)
            self.tokenizer_queried = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._assets_due.wait(), pause_s)

    async def _fetch_model(self) -> "ServedModel":
        """Reads the model from the list of models, in which vLLM's servers and ours report it."""
        with contextlib.suppress(UpstreamError):
            status, body = await self._upstream.fetch(self._endpoint.url, MODELS_PATH, SNAPSHOT_TIMEOUT_S)
            if status == 200:
                return read_model(body, self._endpoint.model)
        return ServedModel()

    async def _follow_events(self) -> None:
        pause_s = RECONNECT_PAUSE_S
        while True:
            began_s = self._clock()
            try:
                await self._follow_connection()
                log.info("the event socket of %s closed", self._endpoint.name)
                pause_s = RECONNECT_PAUSE_S
            except Exception as error:  # Whatever an endpoint sends, it must not end the following of it.
                lasted_s = self._clock() - began_s
                pause_s = RECONNECT_PAUSE_S if lasted_s > 2 * LONGEST_PAUSE_S else min(LONGEST_PAUSE_S, 2 * pause_s)
                name, kind = self._endpoint.name, type(error).__name__
                log.warning("events of %s: %s: %s; starting anew in %.1f s", name, kind, error, pause_s)
            await self._lost()
            await asyncio.sleep(pause_s)

    async def _lost(self) -> None:
        """Handles the loss of the event socket: known blocks are kept for a while if the endpoint still answers."""
        if self.live:
            self.stale_until_s = self._clock() + self._stale_ttl_s
            self._index.mark_stale(self._endpoint.name, self.stale_until_s)
        self.live, self.report_s, self.role = False, None, ""
        self._ledger.silence(self._endpoint.name)
        try:
            await self._upstream.fetch(self._endpoint.url, READY_PATH, ALIVE_TIMEOUT_S)
        except UpstreamTimeoutError:
            pass  # Busy or stopped: the same process all the same.
        except (ConnectError, BrokenConnectionError):
            self._drop_blocks()
        except UpstreamError:
            pass  # It answered 503.

    def _drop_blocks(self) -> None:
        self.stale_until_s = 0.0
        self._index.clear(self._endpoint.name)

    async def _follow_connection(self) -> None:
        """Follows one connection, from its handshake until it breaks."""
        if self._endpoint.peer_auth and self._secret is None:
            self.refused = True
            raise PeerRefusedError("it requires proof of membership, and the gateway has no --peer-key-file")
        socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        monitor = socket.get_monitor_socket(_EVENTS)
        tasks: list[asyncio.Future[Any]] = []
        try:
            zmq_limits.SUBSCRIBER.apply(socket)
            secure_client(socket, self._secret)
            socket.ipv6 = True
            socket.reconnect_ivl_max = 1000
            socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, 3 * HEARTBEAT_MS
            socket.subscribe(b"")  # vLLM's events have the topic that its flag says, by default none
            socket.connect(self._endpoint.events)
            descriptor, event = await _handshake(monitor)
            self.refused = bool(event & _REFUSALS)
            if self.refused:
                raise PeerRefusedError(
                    "the handshake failed: --peer-key-file is not the secret that it was started with"
                    if self._secret
                    else "the handshake failed: it may want proof of membership (its endpoint's peer_auth says none)"
                )
            unread = UnreadBytes(descriptor)
            work = (self._read(socket, unread), unread.watch(), _connection_changed(monitor))
            tasks = [asyncio.ensure_future(each) for each in work]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks[:2]:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            socket.disable_monitor()
            monitor.close(0)
            socket.close(0)

    async def _read(self, socket: zmq.asyncio.Socket, unread: UnreadBytes) -> None:
        self._learn(Evidence.SOCKET)
        self._assets_due.set()
        self._sequencer = Sequencer()
        await self._resync()
        self.live = True
        while True:
            frames = await socket.recv_multipart()
            unread.took(frames)
            topic, frame, payload = frames
            await self._yield_to_loop()
            if topic == LOAD_TOPIC:
                report = decode_load(payload)
                self.role = report.role
                self._ledger.report(self._endpoint.name, report)
                self.report_s, self.lag_s = self._clock(), time.time() - report.ts
                self._learn(Evidence.REPORT)
                continue
            sequence, batch = read_sequence(frame), decode_batch(payload)
            match self._sequencer.observe(sequence):
                case Verdict.NEXT:
                    await self._apply(sequence, batch)
                case Verdict.ALREADY_APPLIED:
                    pass
                case Verdict.GAP:
                    await self._heal(sequence, batch)
                case Verdict.RESTARTED:
                    log.info("%s restarted", self._endpoint.name)
                    self._index.clear(self._endpoint.name)
                    await self._resync()
                    await self._apply_if_new(sequence, batch)

    def _learn(self, evidence: Evidence) -> None:
        if self._learned(evidence):
            log.info("endpoint %s is back: %s", self._endpoint.name, evidence.value)

    async def _apply(self, sequence: int, batch: KVEventBatch) -> None:
        self._sequencer.applied(sequence)
        self.lag_s = time.time() - batch.ts
        await self._apply_slices(batch.events)

    async def _apply_slices(self, events: Iterable[KVEvent]) -> None:
        """Applies events in slices, between which other tasks can run."""
        for part in slices(events):
            orphans = self._index.apply(self._endpoint.name, part)
            if orphans:
                log.debug("%s stored %d chains whose parents are not known here", self._endpoint.name, orphans)
            await self._yield_to_loop()

    async def _yield_to_loop(self) -> None:
        """Lets the event loop run after SLICE_S of work: awaiting a socket with much to read does not yield to it."""
        if self._clock() - self._breathed_s > SLICE_S:
            await asyncio.sleep(0)
            self._breathed_s = self._clock()

    async def _apply_if_new(self, sequence: int, batch: KVEventBatch) -> None:
        if self._sequencer.expected is None or sequence >= self._sequencer.expected:
            await self._apply(sequence, batch)

    async def _heal(self, sequence: int, batch: KVEventBatch) -> None:
        """Recovers events that were lost before `sequence`: by replay, else by a snapshot, else only from now on."""
        assert self._sequencer.expected is not None
        await self._replay(self._sequencer.expected)
        healed = "replay"
        if self._sequencer.expected < sequence:
            self._index.clear(self._endpoint.name)
            healed = "snapshot" if await self._resync() else "none"
        self._count_gap(healed)
        await self._apply_if_new(sequence, batch)

    async def _resync(self) -> bool:
        """Reloads all blocks of the endpoint, from its snapshot, else from what it can replay."""
        with self._snapshots.reading(self._endpoint.service or self._endpoint.name) as reserve:
            snapshot = await self._snapshot(reserve)
            if snapshot is not None:
                self._index.clear(self._endpoint.name)
                sequence, chains = snapshot
                await self._apply_slices(chains)
                self._sequencer.applied(sequence)
                return True
        self._sequencer.expected = None
        return await self._replay(0)

    async def _snapshot(self, reserve: Callable[[int], bool]) -> tuple[int, Iterator[BlockStored]] | None:
        try:
            # Engines without keys want the header all the same, with any value: no web page can send it.
            headers = [(PEER_HEADER.encode(), b"gateway")] if self._secret is None else []
            url, timeout_s, limit_bytes = self._endpoint.url, SNAPSHOT_TIMEOUT_S, self._snapshots.limit_bytes
            async with asyncio.timeout(WHOLE_SNAPSHOT_TIMEOUT_S):
                status, body = await self._upstream.fetch(
                    url, KV_SNAPSHOT_PATH, timeout_s, headers, limit_bytes, reserve
                )
            return read_snapshot(body) if status == 200 else None
        except (UpstreamError, EventFormatError, TimeoutError) as error:
            log.info("no KV snapshot from %s: %s", self._endpoint.name, error or type(error).__name__)
            return None

    async def _replay(self, first: int) -> bool:
        """Applies the batches from `first` on, as long as they are consecutive. Returns False if none arrived."""
        if not self._endpoint.replay:
            return False
        socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        monitor = socket.get_monitor_socket(zmq.EVENT_CONNECTED)
        came = False
        try:
            zmq_limits.REPLAY_CLIENT.apply(socket)
            secure_client(socket, self._secret)
            socket.ipv6 = True
            socket.connect(self._endpoint.replay)
            await socket.send_multipart([b"", sequence_frame(first)])
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                _, descriptor = await _connection_changed(monitor)
                unread = UnreadBytes(descriptor)
                while reply := read_replay_reply(await unread.receive(socket)):
                    sequence, payload = reply
                    if self._sequencer.expected not in (None, sequence):
                        break  # The endpoint's buffer no longer reaches back that far.
                    await self._apply(sequence, decode_batch(payload))
                    came = True
        except (TimeoutError, EventFormatError, UnreadBytesError) as error:
            log.info("no replay from %s: %s", self._endpoint.name, str(error) or "time-out")
        finally:
            socket.disable_monitor()
            monitor.close(0)
            socket.close(0)
        return came


async def _connection_changed(monitor: zmq.asyncio.Socket) -> tuple[int, int]:
    """Returns the next event of a socket's connection, and the value that comes with it."""
    reply = await cast("Awaitable[Mapping[str, Any]]", recv_monitor_message(monitor))
    return int(reply["event"]), int(reply["value"])


async def _handshake(monitor: zmq.asyncio.Socket) -> tuple[int, int]:
    """Waits for a handshake to end. Returns the connection's descriptor, and the event by which the handshake ended."""
    descriptor = -1
    while True:
        event, value = await _connection_changed(monitor)
        if event != zmq.EVENT_CONNECTED:
            return descriptor, event
        descriptor = value


class ServedModel(msgspec.Struct, frozen=True):
    """An entry of an engine's list of models; a field is None if the engine does not report it."""

    id: str = ""
    max_model_len: int | None = None
    """Largest context length in tokens."""
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    model_impl: str | None = None
    """The code that computes the model: native or transformers."""


class _Models(msgspec.Struct):
    data: list[ServedModel] = []


def read_model(body: bytes, model: str) -> ServedModel:
    """Returns the entry for `model` in a response of MODELS_PATH."""
    try:
        models = msgspec.json.decode(body, type=_Models).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ServedModel()
    return next((entry for entry in models if entry.id == model), ServedModel())
