"""Serves the consumer's side of KV transfer: one connection to each engine that has keys and values, and the requests
over it.

There is one `KVConsumer` in an engine, in its transfer thread. A job ends for its sequence with `TransferDone` or
`TransferFailed`, and for its pages with `Settled`. A late peer may still write to the pages, so they stay pinned until
it has reported that it does not, or is gone. Messages of peers are checked, and an exception costs that message or that
job only.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_engine.core.faults import FaultLog
from mini_infer_engine.core.guarded_connector import FAULT
from mini_infer_engine.kv_transfer.consumer_jobs import KVConsumerLimits, Peer, Proof, ReceiveJob, ReceiveSlot
from mini_infer_engine.kv_transfer.estimates import (
    Load,
    fetching_pays,
    late_after_s,
    prefill_estimate_s,
    read_estimate_s,
)
from mini_infer_engine.kv_transfer.layout import KVLayout, Span, state_span
from mini_infer_engine.kv_transfer.protocol import events, wire
from mini_infer_engine.kv_transfer.protocol.handshake import handshake_refusal
from mini_infer_engine.kv_transfer.protocol.message_checks import granted_fault, written_fault
from mini_infer_engine.kv_transfer.staging_slots import RECEIVE_SLOTS, Area, Slots
from mini_infer_engine.kv_transfer.stats import Counters
from mini_infer_engine.kv_transfer.transport import DigestSum, Motion, Motions, Transport, TransportError
from mini_infer_engine.kv_transfer.trust import Trust
from mini_infer_process import zmq_limits
from mini_infer_process.curve import secure_client

log = logging.getLogger(__name__)

_ANSWER_S = 2.0
"""Seconds for a peer to answer `Hello`, or to report that a prompt is queued. Its transfer thread answers, even during
a pass.
"""
_GRANT_S = 10.0
"""Seconds for a peer to grant a read: its core decides between two passes."""
_LOST_S = 1.0
"""Seconds after the end of a peer's connection after which none of its writes can arrive any more."""
_KEEPALIVE = (
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 5),
    (zmq.TCP_KEEPALIVE_INTVL, 5),
    (zmq.TCP_KEEPALIVE_CNT, 3),
)
"""TCP keepalive: connections to a host that is cut off end within 20 s. Those to a stopped process stay open on
purpose, for it may go on writing.
"""

_MESSAGES_PER_ITERATION = 256
"""The most messages of one peer that are read in a turn, so that one that never stops does not block others."""

_MAX_SLOT_REQUESTS = 1 << 14
"""The most requests for slots of one area that may wait."""


class KVConsumer:
    """Requests keys and values from other engines, and receives them."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        party: Callable[[], wire.Party],
        transport: Transport,
        layout: KVLayout,
        report: Callable[[events.Event], None],
        counters: Counters,
        limits: KVConsumerLimits,
        load: Load,
        faults: FaultLog | None = None,
        secret: PeerSecret | None = None,
    ) -> None:
        """Creates a consumer without peers. `faults` counts exceptions in the handling of messages and jobs, for
        metrics.
        """
        self._faults = FaultLog() if faults is None else faults
        self._context, self._poller = context, poller
        self._party, self._transport, self._layout = party, transport, layout
        self._report, self._counters, self._limits = report, counters, limits
        self._load, self._secret = load, secret
        self._peers: dict[str, Peer] = {}
        self._retired: list[Peer] = []
        """Peers that get no new jobs and have unsettled ones. Some of them have no connection any more."""
        self._trust = Trust()
        counters.mismatches = self._trust.by_source
        self._numbers = itertools.count()
        self._slots: dict[Area, Slots] = {"device": Slots(RECEIVE_SLOTS), "host": Slots(RECEIVE_SLOTS)}
        self._slot_requests: dict[Area, deque[tuple[Peer, ReceiveJob, wire.SlotRequested]]] = {
            "device": deque(),
            "host": deque(),
        }
        """Jobs that wait for a slot, in order of their requests."""

    @property
    def is_busy(self) -> bool:
        """True if bytes are in flight that this engine reads or copies, or are being proved."""
        return any(job.is_reading for peer in self._all() for job in peer.jobs.values())

    @property
    def num_open(self) -> int:
        """Number of jobs that are not settled."""
        return sum(len(peer.jobs) for peer in self._all())

    def _all(self) -> list[Peer]:
        return [*self._peers.values(), *self._retired]

    @property
    def bytes_per_s(self) -> float:
        """Recent rate of reads, including staged ones, of the fastest peer; 0 if none has been measured."""
        return max((peer.bytes_per_s.per_s for peer in self._peers.values()), default=0.0)

    # -- From the core

    def take(self, take: events.Take, now_s: float) -> None:
        """Begins a job, and connects to its peer if necessary."""
        peer = self._peers.get(take.source.address)
        if peer is not None and peer.is_broken:
            self._retire(peer)
            peer = None
        try:
            peer = peer or self._connect(take.source.address)
        except Exception as error:
            if not isinstance(error, zmq.ZMQError):
                self._faults.record("a connection to another engine", error)
            self._report(events.TransferFailed(take.job, "address", f"{take.source.address} is no address: {error}"))
            self._report(events.Settled(take.job))
            return
        job = ReceiveJob(take, now_s, "connecting", now_s + min(_ANSWER_S, self._limits.timeout_s))
        peer.jobs[take.job] = job
        if peer.party is not None:
            self._request_or_fail(peer, job, now_s)

    def cancel(self, number: int) -> None:
        """Cancels a job."""
        for peer in self._all():
            if (job := peer.jobs.get(number)) is not None and job.stage != "given_up":
                self._give_up(peer, job)

    def _connect(self, address: str) -> Peer:
        socket = self._context.socket(zmq.DEALER)
        try:
            monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            identity = f"{self._party().engine_id}/{next(self._numbers)}"
            socket.setsockopt(zmq.IDENTITY, identity.encode())
            socket.setsockopt(zmq.LINGER, 0)
            zmq_limits.TRANSFER_CLIENT.apply(socket)
            secure_client(socket, self._secret)
            socket.setsockopt(zmq.IPV6, 1)  # a name may have addresses of either family
            for option, value in _KEEPALIVE:
                socket.setsockopt(option, value)
            socket.connect(address)
        except Exception:
            socket.disable_monitor()
            socket.close(linger=0)
            raise
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        peer = self._peers[address] = Peer(address, socket, monitor)
        self._send(peer, wire.Hello(self._party()))
        return peer

    def _send(self, peer: Peer, message: wire.FromConsumer) -> None:
        """Sends a message without waiting. Nothing is sent to a peer whose connection is closed."""
        if peer.socket.closed:
            return
        try:
            peer.socket.send(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            log.info("%s takes no messages", peer.address)

    def _request_or_fail(self, peer: Peer, job: ReceiveJob, now_s: float) -> None:
        """Sends a job's request. A request that cannot be encoded fails its own job alone."""
        try:
            self._request(peer, job, now_s)
        except Exception as error:
            self._faults.record("a request to another engine", error)
            self._fail(peer, job, FAULT, "it could not be requested", is_settled=True)

    def _request(self, peer: Peer, job: ReceiveJob, now_s: float) -> None:
        take = job.take
        if peer.party is not None and self._trust.distrusts(peer.party.engine_id):
            message = f"{peer.address} has sent wrong bytes too often; the log says when"
            self._fail(peer, job, "distrusted", message, is_settled=True)
            return
        job.stage = "asked"
        tokens = take.num_tokens - take.first_token
        job.num_bytes = tokens * self._layout.group_token_bytes + self._layout.state_bytes
        if take.source.how == "prefill":
            job.deadline_s = now_s + min(_ANSWER_S, self._limits.timeout_s)
            self._send(
                peer,
                wire.PrefillRequested(
                    take.job, take.request, take.pages, take.first_token, self._limits.lease_s, take.state_slot
                ),
            )
            return
        job.deadline_s = now_s + min(_GRANT_S, self._limits.timeout_s)
        token_ids = [*take.request.prompt_token_ids, *take.request.resumed_token_ids]
        job.lease_end_s = now_s + self._limits.lease_s
        request = wire.KVRequested(
            take.job,
            token_ids,
            take.request.cache_salt,
            take.source.retained_id,
            take.first_token,
            self._limits.lease_s,
        )
        self._send(peer, request)

    # -- From producers

    def receive(self, ready: dict[object, int], now_s: float) -> None:
        """Handles messages of producers, and the ends of their connections."""
        for peer in self._all():
            if peer.socket in ready:
                self._receive_from(peer, now_s)
            if peer.monitor in ready and not peer.socket.closed:
                recv_monitor_message(peer.monitor, zmq.NOBLOCK)
                self._lose(peer, now_s)

    def _receive_from(self, peer: Peer, now_s: float) -> None:
        for _ in range(_MESSAGES_PER_ITERATION):
            if peer.socket.closed:
                return
            try:
                [payload] = peer.socket.recv_multipart(zmq.NOBLOCK)
                message = wire.decode_from_producer(payload)
            except zmq.Again:
                return
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                self._faults.record(f"a message of {peer.address}", error)
                continue
            try:
                self._handle(peer, message, now_s)
            except Exception as error:
                self._faults.record(f"handling {type(message).__name__} of {peer.address}", error)
                self._handle_fault(peer, message)

    def _handle_fault(self, peer: Peer, message: wire.FromProducer) -> None:
        """Ends the jobs of a message that could not be handled; their pages stay pinned until the peer settles them."""
        number = getattr(message, "job", None)
        jobs = [job for job in peer.jobs.values() if number in (None, job.take.job)]
        peer.is_broken = True
        for job in jobs:
            self._fail(peer, job, FAULT, "what the other engine has sent cannot be handled", is_settled=False)
            self._send(peer, wire.Release([job.take.job]))

    def _handle(self, peer: Peer, message: wire.FromProducer, now_s: float) -> None:
        match message:
            case wire.Welcome(party):
                self._welcome(peer, party, now_s)
            case wire.Refused(reason):
                self._refuse(peer, reason)
            case wire.Released(jobs):
                for number in jobs:
                    if (job := peer.jobs.get(number)) is not None:
                        self._settle_when_still(peer, job)
            case _:
                if (job := peer.jobs.get(message.job)) is not None:
                    self._answer(peer, job, message, now_s)

    def _welcome(self, peer: Peer, party: wire.Party, now_s: float) -> None:
        refusal = handshake_refusal(self._party(), party)
        if not refusal:
            try:
                self._transport.add_peer(party.engine_id, party.layout, party.where)
            except TransportError as error:
                refusal = str(error)
            except Exception as error:
                self._faults.record(f"connecting the transport to {peer.address}", error)
                refusal = f"the transport cannot connect to it ({type(error).__name__})"
        if refusal:
            self._refuse(peer, refusal)
            return
        peer.party = party
        for job in list(peer.jobs.values()):
            if job.stage == "connecting":
                self._request_or_fail(peer, job, now_s)
            elif job.stage == "given_up":
                self._settle(peer, job)

    def _refuse(self, peer: Peer, reason: str) -> None:
        """Fails all jobs of a peer that has refused this engine, or that this engine refuses. Earlier requests are
        void: the peer may have restarted.
        """
        log.warning("no KV transfer with %s: %s", peer.address, reason)
        for job in list(peer.jobs.values()):
            self._fail(peer, job, "refused", reason, is_settled=True)
        self._drop(peer)

    def _answer(
        self,
        peer: Peer,
        job: ReceiveJob,
        message: wire.Accepted
        | wire.Prefilled
        | wire.KVGranted
        | wire.SlotRequested
        | wire.Written
        | wire.AllWritten
        | wire.Failed,
        now_s: float,
    ) -> None:
        if isinstance(message, wire.Failed):
            self._fail(peer, job, message.reason, message.message, is_settled=True)
        elif job.stage == "given_up":
            if isinstance(message, wire.Prefilled):
                self._settle_when_still(peer, job)  # it crossed our release: all has been written
            elif isinstance(message, wire.Written):
                self._place(peer, job, message)
        elif isinstance(message, wire.SlotRequested):
            if len(self._slot_requests[message.area]) < _MAX_SLOT_REQUESTS:  # an honest peer wants a few slots a job
                self._slot_requests[message.area].append((peer, job, message))
            self._grant_slots(message.area)
        elif isinstance(message, wire.Written):
            self._place(peer, job, message)
        elif isinstance(message, wire.Prefilled | wire.AllWritten):
            job.last = message
            self._end_when_placed(peer, job, now_s)
        elif isinstance(message, wire.Accepted):
            job.stage = "accepted"
            rate = message.bytes_per_s or peer.bytes_per_s.per_s
            tokens = job.take.num_tokens - job.take.first_token
            job.estimate_s = prefill_estimate_s(
                message.queued_tokens, tokens, message.prefill_tokens_per_s, job.num_bytes, rate
            )
            job.deadline_s = now_s + late_after_s(job.estimate_s, self._limits.timeout_s)
        else:
            self._read(peer, job, message, now_s)

    def _end_when_placed(self, peer: Peer, job: ReceiveJob, now_s: float) -> None:
        if job.is_reading:
            return
        if isinstance(job.last, wire.Prefilled):
            last = job.last
            job.num_bytes = last.num_bytes
            done = events.TransferDone(job.take.job, job.take.num_tokens, last.token_id, last.logprobs, last.num_cached)
            self._prove(peer, job, last.digest, done, now_s)
        elif job.last is not None:
            self._read_ended(peer, job, has_succeeded=True, now_s=now_s)

    def _read(self, peer: Peer, job: ReceiveJob, granted: wire.KVGranted, now_s: float) -> None:
        take, rate = job.take, peer.bytes_per_s.per_s
        end = min(granted.num_tokens, take.num_tokens)
        first = take.first_token - take.first_token % self._layout.page_size
        job.num_bytes = max(0, end - first) * self._layout.group_token_bytes + self._layout.state_bytes
        job.awaits_written = granted.is_staged or granted.is_state_staged
        is_settled = not job.awaits_written  # else its writes to our slots end with its `Released`
        if peer.party is None or (fault := granted_fault(granted, peer.party.layout, take.num_tokens)):
            self._send(peer, wire.Release([take.job]))
            self._fail(peer, job, "bad_message", fault if peer.party else "it has not greeted", is_settled=is_settled)
        elif end <= take.first_token:
            self._send(peer, wire.Release([take.job]))
            self._fail(peer, job, "not_held", "it has no more of the prompt than this engine", is_settled=is_settled)
        elif take.source.how == "prefix" and not fetching_pays(
            end - first, job.num_bytes, rate, self._load.prefill_tokens_per_s, peer.refused_fetches
        ):
            peer.refused_fetches += 1
            self._send(peer, wire.Release([take.job]))
            self._fail(peer, job, "computing_is_cheaper", "this engine computes them sooner", is_settled=is_settled)
        else:
            try:
                job.motion = self._begin_read(peer.party.engine_id, take, granted, first, end)
            except Exception as error:
                if not isinstance(error, TransportError):
                    self._faults.record(f"a read from {peer.address}", error)
                self._fail_transport(peer, job, str(error), is_settled=is_settled)
            else:
                job.stage, job.granted_tokens, job.started_s = "reading", end, now_s
                job.granted_digest = granted.digest
                job.estimate_s = read_estimate_s(job.num_bytes, rate) or None
                job.deadline_s = min(now_s + late_after_s(job.estimate_s, self._limits.timeout_s), job.lease_end_s)

    def _begin_read(
        self, engine_id: str, take: events.Take, granted: wire.KVGranted, first: int, end: int
    ) -> Motion | None:
        """Begins to read what was granted from pool to pool. Returns None if all of it comes through staging slots."""
        spans = [] if granted.is_staged else [Span(take.pages, granted.pages, first, end)]
        if granted.state_slot is not None and not granted.is_state_staged:
            spans.append(state_span(take.state_slot, granted.state_slot))
        motions: list[Motion] = []
        for span in spans:
            try:
                motions.append(self._transport.start(engine_id, "read", span))
            except TransportError:
                if not motions:
                    raise
                return Motions(motions, has_failed=True)  # the first one goes on
        return Motions(motions) if motions else None

    def _fail_transport(self, peer: Peer, job: ReceiveJob, message: str, *, is_settled: bool) -> None:
        """Ends a job after a failure of the transport, and has the next job connect anew.

        The release is sent first, because a peer without jobs is dropped with its connection.
        """
        peer.is_broken = True
        self._send(peer, wire.Release([job.take.job]))
        self._fail(peer, job, "transport", message, is_settled=is_settled)

    # -- Slots

    def _grant_slots(self, area: Area) -> None:
        """Lends free slots of this area to the jobs that wait for them, in order."""
        requests = self._slot_requests[area]
        while requests:
            peer, job, slot_request = requests[0]
            if job.stage != "given_up" and not peer.socket.closed and slot_request.serial not in job.receive_slots:
                slot = self._slots[area].take()
                if slot is None:
                    return
                job.receive_slots[slot_request.serial] = ReceiveSlot(area, slot)
                self._send(peer, wire.SlotGranted(job.take.job, slot_request.serial, slot))
            requests.popleft()

    def _free(self, job: ReceiveJob, serial: int) -> None:
        """Frees a slot that the producer no longer writes to, and lends it to the next job."""
        if (receive_slot := job.receive_slots.pop(serial, None)) is not None:
            self._slots[receive_slot.area].free(receive_slot.slot)
            self._grant_slots(receive_slot.area)

    def _place(self, peer: Peer, job: ReceiveJob, written: wire.Written) -> None:
        """Begins to copy a written slot into the job's pages. It only frees the slot if the job has been given up."""
        receive_slot = job.receive_slots.get(written.serial)
        if receive_slot is None or receive_slot.placing is not None:
            log.warning("%s has written to no slot that was granted to it", peer.address)
            return
        if job.stage == "given_up":
            self._free(job, written.serial)
            return
        if peer.party is None or (fault := written_fault(written, job.take, self._layout)):
            log.warning("%s has written what does not belong into these pages: %s", peer.address, fault)
            self._free(job, written.serial)
            self._fail_transport(peer, job, fault, is_settled=False)
            return
        if written.pool == "pages":
            span = Span(job.take.pages, [], written.begin, written.end, written.layers)
        else:
            span = msgspec.structs.replace(state_span(job.take.state_slot, None), layers=written.layers)
        try:
            receive_slot.placing = self._transport.place(
                peer.party.engine_id, receive_slot.area, receive_slot.slot, span
            )
        except Exception as error:
            if not isinstance(error, TransportError):
                self._faults.record(f"putting in place what {peer.address} has written", error)
            self._free(job, written.serial)
            self._fail_transport(peer, job, str(error), is_settled=False)

    # -- Ends

    def _prove(self, peer: Peer, job: ReceiveJob, expected: int, done: events.TransferDone, now_s: float) -> None:
        """Begins to prove what has arrived, of which nothing is written any more."""
        take = job.take
        spans = [Span(take.pages, [], take.first_token, done.num_tokens)]
        if take.state_slot is not None:
            spans.append(state_span(take.state_slot, None))
        digest = DigestSum([self._transport.digest(span) for span in spans])
        job.proof = Proof(digest, expected, done)
        self._look_at_proof(peer, job, job.proof, now_s)

    def _look_at_proof(self, peer: Peer, job: ReceiveJob, proof: Proof, now_s: float) -> None:
        match proof.digest.progress():
            case "failed":
                job.proof = None
                self._fail(peer, job, FAULT, "the digest of what has arrived cannot be computed", is_settled=True)
            case "done" if proof.digest.value == proof.expected:
                job.proof = None
                self._succeed(peer, job, proof.done, now_s)
            case "done":
                job.proof = None
                self._trust.mismatch(peer.address, "" if peer.party is None else peer.party.engine_id)
                message = f"what {peer.address} has sent did not arrive as it was computed"
                self._fail(peer, job, "mismatch", message, is_settled=True)

    def _succeed(self, peer: Peer, job: ReceiveJob, done: events.TransferDone, now_s: float) -> None:
        counters, seconds = self._counters, now_s - job.started_s
        counters.received += 1
        counters.received_bytes += job.num_bytes
        counters.received_s += seconds
        if job.estimate_s is not None:
            counters.estimated_s += job.estimate_s
            counters.estimate_error_s += abs(seconds - job.estimate_s)
        self._report(done)
        self._settle(peer, job)

    def _fail(self, peer: Peer, job: ReceiveJob, reason: str, message: str, *, is_settled: bool) -> None:
        if job.stage != "given_up":
            job.stage, job.proof = "given_up", None
            self._counters.fallbacks[reason] += 1
            self._report(events.TransferFailed(job.take.job, reason, message))
        if is_settled:
            self._settle_when_still(peer, job)

    def _give_up(self, peer: Peer, job: ReceiveJob) -> None:
        """Requests that the producer stops a job. Its writes may arrive until it reports that it has stopped."""
        was_requested = job.stage != "connecting"
        job.stage, job.proof = "given_up", None
        if not was_requested:
            self._settle(peer, job)
        elif job.motion is None:
            self._send(peer, wire.Release([job.take.job]))

    def _settle_when_still(self, peer: Peer, job: ReceiveJob) -> None:
        """Settles a job to which the producer writes no more, as soon as no read of this engine is in flight either."""
        if job.is_reading:
            job.settles_s = 0.0
        else:
            self._settle(peer, job)

    def _settle(self, peer: Peer, job: ReceiveJob) -> None:
        for serial in list(job.receive_slots):
            self._free(job, serial)
        if peer.jobs.pop(job.take.job, None) is not None:
            self._report(events.Settled(job.take.job))
        if not peer.jobs and (peer.is_broken or self._peers.get(peer.address) is not peer):
            self._drop(peer)

    def _lose(self, peer: Peer, now_s: float) -> None:
        """Handles the end of a peer's connection: its process has ended, or its host is cut off."""
        for job in list(peer.jobs.values()):
            job.settles_s = now_s + _LOST_S
            self._fail(peer, job, "peer_lost", f"{peer.address} is gone", is_settled=False)
        self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        """Closes the connection to a peer, so that the next job connects anew."""
        self._retire(peer)
        self._close(peer)

    def _retire(self, peer: Peer) -> None:
        """Gives no new jobs to this connection, which stays open until its jobs are settled."""
        if self._peers.get(peer.address) is peer:
            del self._peers[peer.address]
            if peer.jobs:
                self._retired.append(peer)

    def _close(self, peer: Peer) -> None:
        if peer.socket.closed:
            return
        self._poller.unregister(peer.socket)
        self._poller.unregister(peer.monitor)
        peer.socket.disable_monitor()
        peer.socket.close(linger=0)

    # -- From time to time

    def advance(self, now_s: float) -> None:
        """Polls reads and time-outs, renews leases, and forgets peers that are gone."""
        for peer in self._all():
            for job in list(peer.jobs.values()):
                try:
                    self._look_at(peer, job, now_s)
                except Exception as error:
                    self._faults.record(f"a transfer from {peer.address}", error)
                    self._end_faulty(peer, job)
            if peer.jobs and not peer.socket.closed and now_s - peer.renewed_s > self._limits.lease_s / 3:
                peer.renewed_s = now_s
                waiting = [number for number, job in peer.jobs.items() if job.stage in ("asked", "accepted")]
                if waiting:
                    self._send(peer, wire.Renew(waiting, self._limits.lease_s))
        self._retired = [peer for peer in self._retired if peer.jobs]

    def _end_faulty(self, peer: Peer, job: ReceiveJob) -> None:
        """Ends a job after an exception. Its pages stay pinned until its peer reports that it writes no more."""
        job.motion = job.proof = None
        for receive_slot in job.receive_slots.values():
            receive_slot.placing = None
        peer.is_broken = True
        self._fail(peer, job, FAULT, "this engine's KV transfer has a fault; its log says which", is_settled=False)
        self._send(peer, wire.Release([job.take.job]))

    def _look_at(self, peer: Peer, job: ReceiveJob, now_s: float) -> None:
        for serial, receive_slot in list(job.receive_slots.items()):
            if receive_slot.placing is not None and (found := receive_slot.placing.progress()) != "busy":
                self._free(job, serial)
                if found == "failed" and job.stage != "given_up":
                    message = "what the other engine has written cannot be put in place"
                    self._fail_transport(peer, job, message, is_settled=False)
        if job.motion is not None and (progress := job.motion.progress()) != "busy":
            job.motion = None
            if progress == "failed" or job.stage == "given_up" or job.last is not None or not job.awaits_written:
                self._read_ended(peer, job, has_succeeded=progress == "done", now_s=now_s)
        elif job.proof is not None:
            self._look_at_proof(peer, job, job.proof, now_s)
        elif job.settles_s is not None and not job.is_reading and now_s >= job.settles_s:
            self._settle(peer, job)
        elif job.last is not None and not job.is_reading and job.stage != "given_up":
            self._end_when_placed(peer, job, now_s)
        elif job.stage != "given_up" and now_s >= job.deadline_s:
            was = job.stage
            reason = "unreachable" if was == "connecting" else "late"
            seconds = now_s - job.started_s
            message = f"{peer.address} has not given keys and values within {seconds:.2f} s ({was})"
            self._counters.fallbacks[reason] += 1
            self._report(events.TransferFailed(job.take.job, reason, message))
            self._give_up(peer, job)
            if was == "connecting":
                self._drop(peer)

    def _read_ended(self, peer: Peer, job: ReceiveJob, *, has_succeeded: bool, now_s: float) -> None:
        is_settled = job.last is not None or not job.awaits_written
        if job.stage != "given_up" and not has_succeeded:
            self._fail_transport(peer, job, "a read from the other engine has failed", is_settled=is_settled)
            return
        self._send(peer, wire.Release([job.take.job]))
        if job.stage == "given_up":
            if is_settled:
                self._settle(peer, job)
        elif time.monotonic() >= job.lease_end_s:
            message = "what was read may be another prompt's by now: the lease has expired"
            self._fail(peer, job, "lease_expired", message, is_settled=True)
        else:
            peer.bytes_per_s.add(job.num_bytes, now_s - job.started_s)
            peer.refused_fetches = 0
            self._prove(peer, job, job.granted_digest, events.TransferDone(job.take.job, job.granted_tokens), now_s)

    def close(self) -> None:
        """Closes all connections."""
        for peer in self._all():
            self._close(peer)
        self._peers.clear()
        self._retired.clear()
