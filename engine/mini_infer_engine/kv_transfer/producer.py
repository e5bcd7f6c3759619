"""Serves the producer's side of KV transfer: requests of other engines, their leases, and the writes to them.

There is one `KVProducer` in an engine, in its transfer thread. It knows the transport and the messages, but neither
sockets nor the scheduler. Messages of peers are checked, and an exception costs that message or that job only.
"""

import itertools
import time
from collections.abc import Callable

from mini_infer_engine.core.faults import FaultLog
from mini_infer_engine.core.guarded_connector import FAULT
from mini_infer_engine.kv_transfer.estimates import Load, RateMeter
from mini_infer_engine.kv_transfer.layout import KVLayout, Span, alignment, state_span
from mini_infer_engine.kv_transfer.producer_jobs import (
    ConsumerChannel,
    EndingRead,
    PageWrite,
    PrefillJob,
    ReadJob,
    Send,
)
from mini_infer_engine.kv_transfer.protocol import events, wire
from mini_infer_engine.kv_transfer.protocol.handshake import handshake_refusal
from mini_infer_engine.kv_transfer.protocol.leases import LeaseTable
from mini_infer_engine.kv_transfer.protocol.message_checks import kv_request_fault, prefill_request_fault
from mini_infer_engine.kv_transfer.staging.staged_write import StagedWrite
from mini_infer_engine.kv_transfer.staging_slots import SEND_SLOTS, Area, Slots
from mini_infer_engine.kv_transfer.stats import Counters
from mini_infer_engine.kv_transfer.token_digests import MODULUS
from mini_infer_engine.kv_transfer.transport import (
    Digest,
    DigestSum,
    KnownDigest,
    Progress,
    Transport,
    TransportError,
)

MAX_OPEN_JOBS = 4096
"""The most prefills and reads of other engines that may be unsettled. Further ones are refused as overload."""
MAX_PEERS = 1024
"""The most engines that may be connected. Those without open jobs are forgotten first; they have to send `Hello` again.
"""


class KVProducer:
    """Computes and sends keys and values for other engines."""

    def __init__(
        self,
        party: Callable[[], wire.Party],
        transport: Transport,
        layout: KVLayout,
        send: Send,
        report: Callable[[events.Event], None],
        counters: Counters,
        faults: FaultLog | None = None,
    ) -> None:
        """Creates a producer without peers. `faults` counts exceptions in the handling of messages and jobs, for
        metrics.
        """
        self._faults = FaultLog() if faults is None else faults
        self._party, self._transport, self._layout = party, transport, layout
        self._send, self._report, self._counters = send, report, counters
        self._peers: dict[bytes, wire.Party] = {}
        self._prefills: dict[str, PrefillJob] = {}
        self._reads: dict[str, ReadJob] = {}
        self._endings: dict[str, EndingRead] = {}
        self._leases: LeaseTable[str] = LeaseTable()
        self._rate = RateMeter()
        self._slots: dict[Area, Slots] = {"device": Slots(SEND_SLOTS), "host": Slots(SEND_SLOTS)}
        self._serials = itertools.count()
        self.load = Load()
        self._requested_tokens: dict[str, int] = {}
        """Missing tokens of prompts that the core has not finished, by key."""

    @property
    def is_busy(self) -> bool:
        """True if bytes are in flight, or tokens wait to be written."""
        is_writing = any(prefill.write is not None or prefill.waiting for prefill in self._prefills.values())
        is_read = any(read.staged or read.digested for read in self._reads.values())
        return is_writing or bool(self._endings) or is_read

    @property
    def num_open(self) -> int:
        """Number of jobs that are not settled."""
        return len(self._prefills) + len(self._reads) + len(self._endings)

    @property
    def bytes_per_s(self) -> float:
        """Recent rate of writes; 0 if it has not been measured yet."""
        return self._rate.per_s

    # -- From consumers

    def handle(self, peer: bytes, message: wire.FromConsumer, now_s: float) -> None:
        """Handles one message of one consumer. An exception costs that message, and the job that it is about."""
        try:
            self._handle(peer, message, now_s)
        except Exception as error:
            self._faults.record(f"handling {type(message).__name__} of another engine", error)
            self._handle_fault(peer, message)

    def _handle_fault(self, peer: bytes, message: wire.FromConsumer) -> None:
        if isinstance(message, wire.Hello):
            self._send(peer, wire.Refused("this engine cannot handle that greeting"))
        elif isinstance(message, wire.PrefillRequested | wire.KVRequested | wire.SlotGranted):
            self._fail(_key(peer, message.job), peer, message.job)

    def _fail(self, key: str, peer: bytes, job: int) -> None:
        """Ends one job by an internal fault, whatever state it is in."""
        message = "this engine's KV transfer has a fault; its log says which"
        prefill, read = self._prefills.get(key), self._reads.get(key)
        if prefill is not None:
            self._give_up(key, prefill, wire.Failed(job, FAULT, message))
        elif read is not None:
            self._fail_read(key, read, message, FAULT)
        else:
            self._send(peer, wire.Failed(job, FAULT, message))

    def _handle(self, peer: bytes, message: wire.FromConsumer, now_s: float) -> None:
        if isinstance(message, wire.Hello):
            self._greet(peer, message.party)
        elif peer not in self._peers:
            self._send(peer, wire.Refused("say Hello first: this engine does not know yours (it may have restarted)"))
        elif isinstance(message, wire.PrefillRequested):
            self._prefill(peer, message, now_s)
        elif isinstance(message, wire.KVRequested):
            self._grant_read(peer, message, now_s)
        elif isinstance(message, wire.Renew):
            for job in message.jobs:
                self._leases.renew(_key(peer, job), now_s, message.lease_s)
        elif isinstance(message, wire.SlotGranted):
            self._grant_slot(_key(peer, message.job), message)
        else:
            self._release(peer, message.jobs)

    def _greet(self, peer: bytes, party: wire.Party) -> None:
        ours = self._party()
        earlier = [identity for identity, peer_of in self._peers.items() if peer_of.engine_id == party.engine_id]
        refusal = handshake_refusal(ours, party)
        if not refusal and not earlier and not self._has_free_peer():
            refusal = f"{MAX_PEERS} engines have jobs here: try again later"
        if not refusal:
            try:
                self._transport.add_peer(party.engine_id, party.layout, party.where)
            except TransportError as error:
                refusal = str(error)
        if refusal:
            self._send(peer, wire.Refused(refusal))
            return
        for old in earlier:
            del self._peers[old]  # it has connected anew
        self._peers[peer] = party
        self._send(peer, wire.Welcome(ours))

    def _has_free_peer(self) -> bool:
        """Returns True if another peer may connect. If there are too many, it forgets the one without open jobs that
        has connected first.
        """
        if len(self._peers) < MAX_PEERS:
            return True
        busy = {prefill.peer for prefill in self._prefills.values()} | {read.peer for read in self._reads.values()}
        busy |= {ending.peer for ending in self._endings.values()}
        idle = next((peer for peer in self._peers if peer not in busy), None)
        if idle is not None:
            self._transport.remove_peer(self._peers.pop(idle).engine_id)
        return idle is not None

    def _refuses(self, peer: bytes, job: int, fault: str) -> bool:
        """Returns True if a new job cannot be accepted; then the consumer has been sent `Failed`."""
        reason = "bad_message"
        if self.num_open >= MAX_OPEN_JOBS:
            reason, fault = "overloaded", f"this engine has {self.num_open} open transfers: try again later"
        if fault:
            self._send(peer, wire.Failed(job, reason, fault))
        return bool(fault)

    def _is_open(self, key: str) -> bool:
        """Returns True if a job of this number is not settled: a correct consumer never reuses a number."""
        return key in self._prefills or key in self._reads or key in self._endings

    def _prefill(self, peer: bytes, requested: wire.PrefillRequested, now_s: float) -> None:
        if self._party().role == "decode":
            message = "this engine's role is decode: it computes no prompts for others"
            self._send(peer, wire.Failed(requested.job, "role", message))
            return
        key, tokens = _key(peer, requested.job), max(0, len(requested.request.prompt_token_ids) - requested.first_token)
        if self._is_open(key):
            return
        if self._refuses(peer, requested.job, prefill_request_fault(requested, self._peers[peer].layout)):
            return
        queued = self.load.queued_tokens + sum(self._requested_tokens.values())
        self._prefills[key] = PrefillJob(peer, requested.job, requested.pages, requested.state_slot)
        self._requested_tokens[key] = tokens
        self._leases.open(key, now_s, requested.lease_s)
        step = alignment(self._layout, self._peers[peer].layout)
        self._report(events.PrefillRequest(key, requested.request, requested.first_token, step))
        self._send(peer, wire.Accepted(requested.job, queued, self.load.prefill_tokens_per_s, self._rate.per_s))

    def _grant_read(self, peer: bytes, requested: wire.KVRequested, now_s: float) -> None:
        key = _key(peer, requested.job)
        if self._is_open(key) or self._refuses(peer, requested.job, kv_request_fault(requested)):
            return
        self._reads[key] = ReadJob(
            peer, requested.job, requested.lease_s, requested.first_token, len(requested.token_ids)
        )
        self._leases.open(key, now_s, requested.lease_s)
        self._report(
            events.KVRequest(key, requested.token_ids, requested.cache_salt, requested.held_id, requested.first_token)
        )

    def _release(self, peer: bytes, jobs: list[int]) -> None:
        released = []
        for job in jobs:
            key = _key(peer, job)
            self._leases.close(key)
            prefill = self._prefills.get(key)
            if prefill is not None:
                self._give_up(key, prefill, wire.Released([job]))
                continue
            self._end_read(key)
            if key in self._endings:
                self._endings[key].is_released = True
            else:
                released.append(job)
        if released:
            self._send(peer, wire.Released(released))

    def _end_read(self, key: str) -> None:
        """Ends a read that has finished, was cancelled, or whose lease has expired. Staged writes in flight go on as an
        `EndingRead`.
        """
        read = self._reads.pop(key, None)
        if read is not None:
            for staged in read.staged:
                staged.abandon()
            busy = [staged for staged in read.staged if staged.progress() == "busy"]
            if busy:
                self._endings[key] = EndingRead(read.peer, read.job, busy)
            self._report(events.JobEnded(key))

    def _grant_slot(self, key: str, grant_of_slot: wire.SlotGranted) -> None:
        prefill, read = self._prefills.get(key), self._reads.get(key)
        if prefill is not None and prefill.write is not None and isinstance(prefill.write.motion, StagedWrite):
            prefill.write.motion.grant_slot(grant_of_slot.serial, grant_of_slot.slot)
        for staged in [] if read is None else read.staged:
            staged.grant_slot(grant_of_slot.serial, grant_of_slot.slot)

    def _give_up(self, key: str, prefill: PrefillJob, final_message: wire.FromProducer) -> None:
        """Cancels a prefill. A write in flight ends by itself, and `final_message` are sent after it."""
        prefill.final_message = final_message
        if prefill.is_active:
            prefill.is_active = False
            self._leases.close(key)
            self._requested_tokens.pop(key, None)
            self._report(events.JobEnded(key))
            if prefill.write is not None and not prefill.write.ends_give:
                prefill.waiting.popleft()  # told of when the write has ended
                prefill.write.ends_give = True
            if prefill.write is not None and isinstance(prefill.write.motion, StagedWrite):
                prefill.write.motion.abandon()
            for give in prefill.waiting:
                self._report(events.SendDone(key, give.serial))
            prefill.waiting.clear()
        self._settle(key, prefill)

    def _settle(self, key: str, prefill: PrefillJob) -> None:
        if prefill.final_message is not None and prefill.write is None:
            del self._prefills[key]
            self._send(prefill.peer, prefill.final_message)

    # -- From the core

    def do(self, command: "events.Send | events.SendEnd | events.Grant | events.Refuse") -> None:
        """Executes a command of the core. An exception costs the job that it is about."""
        try:
            match command:
                case events.Send():
                    self.give(command)
                case events.SendEnd():
                    self.end(command)
                case events.Grant():
                    self.grant(command)
                case events.Refuse():
                    self.refuse(command)
        except Exception as error:
            self._faults.record(f"the command {type(command).__name__}", error)
            job = self._prefills.get(command.key) or self._reads.get(command.key)
            if job is not None:
                self._end_faulty(command.key, job)

    def _end_faulty(self, key: str, job: "PrefillJob | ReadJob") -> None:
        """Ends a job after an exception. A write whose state cannot be polled any more counts as ended."""
        write = job.write if isinstance(job, PrefillJob) else None
        if isinstance(job, PrefillJob) and write is not None and not self._ends_by_itself(job, write):
            self._report(events.SendDone(key, write.give.serial))
            if not write.ends_give and job.waiting:
                job.waiting.popleft()
            job.write = None
        self._fail(key, job.peer, job.job)

    @staticmethod
    def _ends_by_itself(prefill: PrefillJob, write: PageWrite) -> bool:
        """Returns True if the write is staged and not abandoned yet, so that its slots have to be freed."""
        return prefill.is_active and isinstance(write.motion, StagedWrite)

    def give(self, give: events.Send) -> None:
        """Writes computed tokens to the consumer."""
        prefill = self._prefills.get(give.key)
        if prefill is None or not prefill.is_active:
            self._report(events.SendDone(give.key, give.serial))
            return
        prefill.waiting.append(give)
        self._begin_next(give.key, prefill)

    def _begin_next(self, key: str, prefill: PrefillJob) -> None:
        if prefill.write is not None or not prefill.waiting:
            return
        give, party = prefill.waiting[0], self._peers.get(prefill.peer)
        span = self._computed(prefill, give)
        if span is None:
            return  # looked at again by `advance`
        try:
            if party is None:
                raise TransportError("its engine has restarted")
            digest = self._digest(party, give) if self._is_last(span) else None
            staged = self._staged_write(prefill.peer, prefill.job, party, span)
            motion = staged or self._transport.start(party.engine_id, "write", span)
        except Exception as error:
            if not isinstance(error, TransportError):
                self._faults.record("a write to another engine", error)
            self._peers.pop(prefill.peer, None)  # it is to greet again: then it is connected anew
            self._give_up(key, prefill, wire.Failed(prefill.job, "transport", str(error)))
            return
        prefill.write = PageWrite(give, motion, time.monotonic(), self._has_begun(prefill, span), digest)

    def _digest(self, party: wire.Party, give: events.Send) -> Digest:
        """Begins to compute the digest of all layers of an entry of `waiting`, as its consumer should have them."""
        return self._transport.digest(Span(give.pages, [], give.begin, give.end, pool=give.pool), party.layout)

    def _computed(self, prefill: PrefillJob, give: events.Send) -> Span | None:
        """Returns the computed layers of the first entry of `waiting` that are not in flight yet, or None if there are
        none.
        """
        if give.pool == "states":
            return state_span(give.pages[0], prefill.state_slot)
        layers = None
        if give.layers is not None:
            layers = (prefill.next_layer, give.layers.num_done())
            if layers[0] == layers[1]:
                return None
        return Span(give.pages, prefill.pages, give.begin, give.end, layers)

    def _is_last(self, span: Span) -> bool:
        """Returns True if the span contains the last layer of its `Send`."""
        return span.layers is None or span.layers[1] == self._layout.num_layers

    def _has_begun(self, prefill: PrefillJob, span: Span) -> bool:
        """Advances `next_layer` behind a write that has begun. Returns True if it is the last one of the first entry of
        `waiting`, which is then removed.
        """
        is_last = self._is_last(span)
        prefill.next_layer = 0 if is_last or span.layers is None else span.layers[1]
        if is_last:
            prefill.waiting.popleft()
        return is_last

    def _add_layers(self, prefill: PrefillJob, write: PageWrite, staged: StagedWrite) -> None:
        """Adds layers that have been computed meanwhile to a staged write, so that they need not wait for its end.

        A staged write that has ended before them was faster than the computation: the next layers get a write of their
        own, which is timed by itself.
        """
        if write.ends_give or write.give.layers is None or prefill.peer not in self._peers:
            return
        span = self._computed(prefill, write.give)
        if span is not None and staged.add(span, is_last=self._is_last(span)):
            write.ends_give = self._has_begun(prefill, span)

    def _staged_write(self, peer: bytes, job: int, party: wire.Party, span: Span) -> StagedWrite | None:
        """Returns a staged write of a span to the other engine, or None if it goes from pool to pool."""
        area = self._transport.staging_area(party.engine_id, span)
        if area is None:
            return None
        slot_bytes = self._transport.slot_bytes(party.engine_id, area, span.pool)
        channel = ConsumerChannel(peer, job, party, area, slot_bytes, self._transport, self._layout, self._send)
        try:
            return StagedWrite(span, channel, self._slots[area], self._serials)
        except ValueError as error:
            raise TransportError(str(error)) from None

    def end(self, end: events.SendEnd) -> None:
        """Records a prompt's first token, after which only writes are left."""
        self._requested_tokens.pop(end.key, None)
        prefill = self._prefills.get(end.key)
        if prefill is not None and prefill.is_active:
            prefill.end = end
            self._finish(end.key, prefill)

    def refuse(self, refuse: events.Refuse) -> None:
        """Fails a job that the core has refused."""
        prefill, read = self._prefills.get(refuse.key), self._reads.pop(refuse.key, None)
        if prefill is not None:
            self._give_up(refuse.key, prefill, wire.Failed(prefill.job, refuse.reason, refuse.message))
        if read is not None:
            self._leases.close(refuse.key)
            self._send(read.peer, wire.Failed(read.job, refuse.reason, refuse.message))

    def grant(self, grant: events.Grant) -> None:
        """Grants a read of what the core has pinned, directly or through staging slots."""
        read = self._reads.get(grant.key)
        if read is None:  # released, or expired, meanwhile
            self._report(events.JobEnded(grant.key))
            return
        try:
            read.digested = grant, self._digest_of_grant(read, grant)
        except Exception as error:
            self._end_grant(grant, read, error)
        else:
            self._look_at_grant(grant.key, read)

    def _end_grant(self, grant: events.Grant, read: ReadJob, error: Exception) -> None:
        if not isinstance(error, TransportError):
            self._faults.record("granting another engine a read", error)
        self._fail_read(grant.key, read, str(error))

    def _digest_of_grant(self, read: ReadJob, grant: events.Grant) -> Digest:
        """Begins to compute the digest of what the consumer will read of a grant."""
        party, end = self._party_of(read.peer), min(grant.num_tokens, read.num_tokens)
        if end <= read.first_token:
            return KnownDigest(0)
        spans = [Span(grant.pages, [], read.first_token, end)]
        if grant.state_slot is not None:
            spans.append(state_span(grant.state_slot, None))
        return DigestSum([self._transport.digest(span, party.layout) for span in spans])

    def _party_of(self, peer: bytes) -> wire.Party:
        """Returns a peer's description. Raises TransportError if it is not connected any more."""
        if (party := self._peers.get(peer)) is None:
            raise TransportError("its engine has restarted")
        return party

    def _look_at_grant(self, key: str, read: ReadJob) -> None:
        """Tells the consumer of a grant once its digest is known."""
        if read.digested is None:
            return
        grant, digest = read.digested
        match digest.progress():
            case "done":
                read.digested = None
                self._send_grant(key, read, grant, digest.value)
            case "failed":
                self._fail_read(key, read, "the digest of what was granted cannot be computed")

    def _send_grant(self, key: str, read: ReadJob, grant: events.Grant, digest: int) -> None:
        end = min(grant.num_tokens, read.num_tokens)
        pages = state = None
        try:
            party = self._party_of(read.peer)
            if end > read.first_token:
                span = Span(grant.pages, [], read.first_token, end)
                pages = self._staged_write(read.peer, read.job, party, span)
                if grant.state_slot is not None:
                    state = self._staged_write(read.peer, read.job, party, state_span(grant.state_slot, None))
                read.staged = [staged for staged in (pages, state) if staged is not None]
        except Exception as error:
            self._end_grant(grant, read, error)
            return
        self._counters.sent += 1
        granted = wire.KVGranted(
            read.job,
            grant.pages,
            grant.num_tokens,
            read.lease_s,
            is_staged=pages is not None,
            state_slot=grant.state_slot,
            is_state_staged=state is not None,
            digest=digest,
        )
        self._send(read.peer, granted)

    def _fail_read(self, key: str, read: ReadJob, message: str, reason: str = "transport") -> None:
        self._leases.close(key)
        self._end_read(key)
        self._send(read.peer, wire.Failed(read.job, reason, message))

    # -- From time to time

    def advance(self, now_s: float) -> None:
        """Polls transfers in flight, and expires leases."""
        jobs: list[tuple[str, PrefillJob | ReadJob]] = [*self._prefills.items(), *self._reads.items()]
        for key, job in jobs:
            try:
                self._look_at_job(key, job, now_s)
            except Exception as error:
                self._faults.record("a transfer to another engine", error)
                self._end_faulty(key, job)
        for key, ending in list(self._endings.items()):
            if self._is_over(ending):
                del self._endings[key]
                if ending.is_released:
                    self._send(ending.peer, wire.Released([ending.job]))
        for key in self._leases.expire(now_s):
            self._counters.leases_expired += 1
            if (expired := self._prefills.get(key)) is not None:
                message = "its lease has expired: nobody has renewed it in time"
                self._give_up(key, expired, wire.Failed(expired.job, "lease_expired", message))
            else:
                self._end_read(key)

    def _is_over(self, ending: EndingRead) -> bool:
        try:
            return all(staged.progress() != "busy" for staged in ending.staged)
        except Exception as error:
            self._faults.record("the end of a transfer to another engine", error)
            return True

    def _look_at_job(self, key: str, job: "PrefillJob | ReadJob", now_s: float) -> None:
        if isinstance(job, ReadJob):
            self._look_at_grant(key, job)
            if job.staged:
                self._look_at_read(key, job)
        elif job.write is not None:
            self._look_at(key, job, job.write, now_s)
        elif job.waiting:
            self._begin_next(key, job)

    def _look_at_read(self, key: str, read: ReadJob) -> None:
        for staged in list(read.staged):
            match staged.progress():
                case "done":
                    read.staged.remove(staged)
                    self._counters.sent_bytes += staged.num_bytes
                case "failed":
                    message = "what was granted cannot be gathered, or not be written to the other engine"
                    self._fail_read(key, read, message)
                    return
        if not read.staged:
            self._send(read.peer, wire.AllWritten(read.job))

    def _look_at(self, key: str, prefill: PrefillJob, write: PageWrite, now_s: float) -> None:
        progress = write.motion.progress()
        if progress == "busy":
            if prefill.is_active and isinstance(write.motion, StagedWrite):
                self._add_layers(prefill, write, write.motion)
            return
        if progress == "done" and write.ends_give and prefill.is_active:
            progress = self._look_at_digest(prefill, write)
            if progress == "busy":
                return  # the pages are read until then
        prefill.write = None
        if write.ends_give:
            self._report(events.SendDone(key, write.give.serial))
        if prefill.final_message is not None:
            self._settle(key, prefill)
        elif progress == "failed":
            message = "a write to the other engine has failed"
            self._peers.pop(prefill.peer, None)
            self._give_up(key, prefill, wire.Failed(prefill.job, "transport", message))
        else:
            num_bytes = write.motion.num_bytes
            prefill.num_bytes += num_bytes
            prefill.digest += 0 if write.digest is None else write.digest.value
            self._counters.sent_bytes += num_bytes
            self._counters.sent_s += now_s - write.started_s
            self._rate.add(num_bytes, now_s - write.started_s)
            self._begin_next(key, prefill)
            self._finish(key, prefill)

    def _look_at_digest(self, prefill: PrefillJob, write: PageWrite) -> Progress:
        """Polls the digest of a write that has ended, which may have to begin: layers were added to the write."""
        party = self._peers.get(prefill.peer)
        if write.digest is None and party is not None:
            write.digest = self._digest(party, write.give)
        return "failed" if write.digest is None else write.digest.progress()

    def _finish(self, key: str, prefill: PrefillJob) -> None:
        """Sends `Prefilled` once the last byte has been written and the token is known."""
        if prefill.end is None or prefill.write is not None or prefill.waiting or not prefill.is_active:
            return
        end = prefill.end
        del self._prefills[key]
        self._leases.close(key)
        self._counters.sent += 1
        self._send(
            prefill.peer,
            wire.Prefilled(
                prefill.job,
                end.token_id,
                list(end.logprobs),
                end.num_cached,
                prefill.num_bytes,
                prefill.digest % MODULUS,
            ),
        )


def _key(peer: bytes, job: int) -> str:
    return f"{peer.hex()}/{job}"
