"""Connects the core to KV transfer (see `KVConnector`): pins pages for transfers, and reports their results to the
scheduler.

Everything here runs in the core's thread; it talks to the transfer thread by `TransferWorker.do` and `events`.
"""

import itertools
import logging
import queue
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from mini_infer_contract.blocks import root_key
from mini_infer_engine.core.faults import FaultLog
from mini_infer_engine.core.guarded_connector import FAULT
from mini_infer_engine.core.kv_transfer import NO_TRANSFERS, KVTransferStats, LayerProgress, NotReceived, Received, Work
from mini_infer_engine.core.request import Output, Request
from mini_infer_engine.core.scheduler import Scheduler
from mini_infer_engine.core.sequence import Sequence
from mini_infer_engine.kv_transfer.prefix_loads import PrefixLoads
from mini_infer_engine.kv_transfer.protocol import events
from mini_infer_engine.kv_transfer.protocol.leases import MAX_LEASE_S, LeaseTable
from mini_infer_engine.kv_transfer.protocol.message_checks import first_token_fault
from mini_infer_engine.kv_transfer.worker import TransferWorker

_PREFIX = "kv-transfer/"
"""Prefix of the ids of other engines' requests; clients' ids have a # in them."""
_RETAINED_LEASES = 6.0
"""Lease lengths for which a finished prompt is retained: its proxy may take a while to send the request for it to
another engine, and nobody renews the lease meanwhile.
"""

ANY_VOCABULARY = 1 << 32
"""More tokens than any model has, so that every token id is valid."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pinned:
    """Memory that a transfer reads or writes, and that nothing else may reuse meanwhile."""

    pages: list[int]
    slot: int | None = None
    """The slot of a running sequence, whose recurrent state is read or written."""
    checkpoint: int | None = None
    """A checkpoint of recurrent state that is read."""


_NOTHING = _Pinned([])


@dataclass(slots=True)
class _Receiving:
    request: Request
    address: str
    """Address of the engine that sends the keys and values."""
    pinned: "_Pinned"
    """The sequence's pages, and its slot if the model has recurrent states."""
    has_failed: bool = False
    """True if the transfer has failed and the other engine may still write: it has not reported that it stopped."""


@dataclass(slots=True)
class _Sending:
    key: str
    sent: int
    """Tokens that the consumer has already, or that were handed to the transfer thread."""
    alignment: int
    has_state: bool = False
    """True if the recurrent state after all tokens was handed over."""


@dataclass(slots=True)
class _Retained:
    token_ids: list[int]
    """The prompt's, with words of images for their placeholders."""
    pinned: _Pinned
    """The prompt's pages, and the checkpoint before its last token if the model has recurrent states."""


def any_request(request: Request) -> None:
    """Accepts every request of another engine. It is the default check, for tests."""


class TransferConnector:
    """Implements `core.kv_transfer.KVConnector`.

    Each event of the transfer thread is handled by itself: one that raises costs its own job. If the thread fails, all
    jobs fail, and nothing is transferred any more.
    """

    def __init__(
        self,
        worker: TransferWorker,
        scheduler: Scheduler,
        model_revision: str,
        advertised: tuple[str, int],
        *,
        lease_s: float,
        falls_back: bool,
        queued_tokens: Callable[[], int],
        retained_share: float = 0.5,
        check: Callable[[Request], None] = any_request,
        vocab_size: int = ANY_VOCABULARY,
    ) -> None:
        """Connects a scheduler to a transfer worker.

        `advertised` is the host and port at which other engines reach the transfer port. `retained_share` bounds the
        pages of prompts that have ended and are retained for other engines, as a share of the pool. `check` raises
        ValueError if another engine's request has values that this engine cannot serve.
        """
        self.falls_back = falls_back
        self._worker, self._scheduler, self._kv_cache = worker, scheduler, scheduler.kv_cache
        self._has_states = worker.identity.memory.layout.states is not None
        self._model_revision = model_revision
        self._advertised = advertised
        self._retain_s = min(lease_s * _RETAINED_LEASES, MAX_LEASE_S)
        self._most_retained = int(self._kv_cache.num_pages * retained_share)
        self._num_retained = 0
        self._check, self._vocab_size = check, vocab_size
        self._queued_tokens = queued_tokens
        self._jobs = itertools.count()
        self._serials = itertools.count()
        self._receiving: dict[int, _Receiving] = {}
        self._sending: dict[str, _Sending] = {}
        """Prompts that are computed for other engines, by request id."""
        self._retained: dict[str, _Retained] = {}
        self._retained_leases: LeaseTable[str] = LeaseTable()
        self._pins: dict[tuple[str, int], _Pinned] = {}
        """Pages that other engines read or are given, by key and serial number; a grant has the number -1."""
        self._next_grants: list[events.Grant] = []
        """Grants for the next call of `take`: a launched pass may still be writing the cached blocks."""
        self._prefix_loads = PrefixLoads(scheduler.tiers, model_revision)
        self._unasked: list[NotReceived] = []
        """Results for sequences that were not requested, because their peer hangs."""
        self._skipped: Counter[str] = Counter()
        self._expired = 0
        self._faults = FaultLog()
        self._is_off = False
        """True if the transfer thread has failed."""
        self._seen: tuple[object, ...] = ()
        self._stats = NO_TRANSFERS
        self._pinned = 0

    # -- Taking

    def refuses(self, request: Request) -> str:
        """Returns the reason why this request's keys and values cannot come from another engine, or an empty string."""
        if self._is_off:
            return "transfer_failed"
        if request.sampling.prompt_logprobs is not None:
            return "prompt_logprobs"
        if request.embeds:
            return "embedding"
        if request.beam_search is not None:
            return "beam_search"
        return ""

    def skip(self, reason: str) -> None:
        """Counts a sequence that is computed here instead."""
        self._skipped[reason] += 1

    def receive(self, sequence: Sequence) -> None:
        """Pins the sequence's pages and its slot, and has the transfer thread request their content.

        If an earlier transfer from the same engine has failed and is not settled, it refuses at once instead.
        """
        source, job, request = sequence.kv_source, next(self._jobs), sequence.request
        assert source is not None
        if any(receiving.has_failed and receiving.address == source.address for receiving in self._receiving.values()):
            self.skip("peer_hangs")
            message = f"{source.address} has not settled an earlier transfer: more would only pin more pages"
            self._unasked.append(NotReceived(request.request_id, "peer_hangs", message))
            return
        first = sequence.num_computed
        pages = list(sequence.pages)
        slot = sequence.slot if self._has_states else None
        pinned = self._pin(_Pinned(pages, slot))
        self._receiving[job] = _Receiving(request, source.address, pinned)
        resumed = sequence.token_ids[sequence.num_prompt :].tolist()
        reads = source.how != "prefill"  # by the ids of block keys, which name images
        prompt = sequence.key_ids(0, sequence.num_prompt) if reads else request.prompt_token_ids
        remote_request = msgspec.structs.replace(
            request,
            prompt_token_ids=list(prompt),
            images=[] if reads else request.images,
            resumed_token_ids=resumed,
            sampling=msgspec.structs.replace(request.sampling, max_tokens=len(resumed) + 1),
            kv_source=None,
            retains_kv=False,
        )
        self._worker.do(events.Take(job, remote_request, source, pages, first, len(sequence.token_ids), slot))

    def cancel(self, sequence: Sequence) -> None:
        """Has the transfer thread cancel the sequence's jobs. Its pages stay pinned until the jobs are settled."""
        for job, receiving in self._receiving.items():
            if receiving.request.request_id == sequence.request.request_id:
                self._worker.do(events.Cancel(job))

    def has_news(self, now_s: float) -> bool:
        """Returns True if there are events, grants or expired leases for `take`."""
        worker = self._worker
        has_failed = worker.failure is not None and not self._is_off
        return bool(
            self._next_grants
            or self._unasked
            or not worker.events.empty()
            or has_failed
            or self._prefix_loads.have_ended
            or self._retained_leases.has_expired(now_s)
        )

    def take(self, now_s: float, prefill_tokens_per_s: float) -> Work:
        """Handles all events of the transfer thread, expires leases and sends grants, without waiting."""
        for request_id in self._retained_leases.expire(now_s):
            self._expired += 1
            self._release_retained(request_id)
        for grant in self._next_grants:
            self._worker.do(grant)
        self._next_grants.clear()
        for requested in self._prefix_loads.take_ended():
            self._grant_cached(requested)
        work = Work(came=list(self._unasked))
        self._unasked.clear()
        self._worker.drain_wakes()
        while True:
            try:
                event = self._worker.events.get_nowait()
            except queue.Empty:
                break
            try:
                self._handle(event, work)
            except Exception as error:
                self._faults.record(f"the event {type(event).__name__}", error)
                self._handle_fault(event, work)
        if self._worker.failure is not None and not self._is_off:
            self._switch_off(self._worker.failure, work)
        load = self._worker.load
        load.queued_tokens, load.prefill_tokens_per_s = self._queued_tokens(), prefill_tokens_per_s
        return work

    def _handle_fault(self, event: events.Event, work: Work) -> None:
        """Ends the job of an event that could not be handled."""
        message = "this engine's KV transfer has a fault; its log says which"
        match event:
            case events.TransferDone(job) | events.TransferFailed(job):
                if (receiving := self._receiving.get(job)) is not None:
                    work.came.append(NotReceived(receiving.request.request_id, FAULT, message))
            case events.PrefillRequest(key) | events.KVRequest(key):
                self._sending.pop(_PREFIX + key, None)
                self._worker.do(events.Refuse(key, FAULT, message))
            case _:
                pass

    def _switch_off(self, failure: BaseException, work: Work) -> None:
        """Ends all jobs when the transfer thread has failed.

        Prompts that were to be received are computed here. Their pages stay pinned, for another engine may still write
        to them. Pages that other engines read are unpinned, for no read can be reported as valid any more.
        """
        self._is_off = True
        log.error(
            "KV transfer is switched off (%s: %s): all prompts are computed here", type(failure).__name__, failure
        )
        message = "this engine's KV transfer has failed"
        awaited = [receiving.request.request_id for receiving in self._receiving.values()]
        work.came.extend(NotReceived(request_id, "transfer_failed", message) for request_id in awaited)
        work.abort.extend(self._sending)
        self._sending.clear()
        self._next_grants.clear()
        self._prefix_loads.clear()
        for pinned in self._pins.values():
            self._unpin(pinned)
        self._pins.clear()
        for request_id in list(self._retained):
            self._drop_retained(request_id)

    def _handle(self, event: events.Event, work: Work) -> None:
        match event:
            case events.TransferDone(job, num_tokens, token_id, logprobs, num_cached):
                request = self._receiving[job].request
                num_tokens = min(num_tokens, self._num_known_tokens(job))
                if token_id is None:  # all is there, and the last known token is computed for what follows it
                    num_tokens = max(0, min(num_tokens, self._num_known_tokens(job) - 1))
                elif fault := first_token_fault(token_id, logprobs, request.sampling, self._vocab_size):
                    message = f"the other engine has sent a wrong first token: {fault}"
                    work.came.append(NotReceived(request.request_id, "bad_message", message))
                    return
                num_cached = min(num_cached, len(request.prompt_token_ids) - 1)
                work.came.append(Received(request.request_id, num_tokens, token_id, logprobs, num_cached))
            case events.TransferFailed(job, reason, message):
                receiving = self._receiving[job]
                receiving.has_failed = True
                work.came.append(NotReceived(receiving.request.request_id, reason, message))
            case events.Settled(job):
                self._unpin(self._receiving.pop(job).pinned)
            case events.PrefillRequest():
                self._accept(event, work)
            case events.KVRequest():
                self._grant_read(event)
            case events.SendDone(key, serial):
                self._unpin(self._pins.pop((key, serial), _NOTHING))
            case events.JobEnded(key):
                if self._sending.pop(_PREFIX + key, None) is not None:
                    work.abort.append(_PREFIX + key)
                self._prefix_loads.drop(key)
                self._next_grants = [grant for grant in self._next_grants if grant.key != key]
                self._unpin(self._pins.pop((key, -1), _NOTHING))

    def _accept(self, requested: events.PrefillRequest, work: Work) -> None:
        """Has the engine compute another engine's prompt, if a client could request the same."""
        request_id = _PREFIX + requested.key
        request = msgspec.structs.replace(
            requested.request,
            request_id=request_id,
            sampling=msgspec.structs.replace(
                requested.request.sampling, max_tokens=len(requested.request.resumed_token_ids) + 1
            ),
            kv_source=None,
            retains_kv=False,
        )
        try:
            self._check(request)
        except ValueError as error:
            self._worker.do(events.Refuse(requested.key, "refused_request", str(error)))
            return
        self._sending[request_id] = _Sending(requested.key, requested.first_token, requested.alignment)
        work.accepted.append(requested.request.request_id)
        work.add.append(request)

    def _num_known_tokens(self, job: int) -> int:
        """Returns the number of known tokens of a job's sequence, or 1 if it was aborted."""
        request_id = self._receiving[job].request.request_id
        for sequence in self._scheduler.receiving:
            if sequence.request.request_id == request_id:
                return len(sequence.token_ids)
        return 1  # it was aborted

    # -- Giving

    def accept_failed(self, request_id: str, message: str) -> None:
        """Refuses another engine's request that the core could not accept."""
        sending = self._sending.pop(request_id, None)
        if sending is not None:  # else whoever wanted it has gone meanwhile
            self._worker.do(events.Refuse(sending.key, "refused_request", message))

    def sends(self, sequence: Sequence) -> bool:
        """Returns True if another engine waits for this sequence's keys and values."""
        return sequence.request.request_id in self._sending

    def launched(self, sequence: Sequence, num_tokens: int, layers: LayerProgress) -> None:
        """Hands over the tokens of a pass that begins: layers are sent as they are computed."""
        self._give(sequence, num_tokens, layers)

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Retains the pages of a finished prompt with `retains_kv`, and hands over computed tokens to the engine that
        waits for them.
        """
        request = sequence.request
        if request.retains_kv and num_tokens >= sequence.num_prefill and request.request_id not in self._retained:
            self._retain(sequence)
        self._give(sequence, num_tokens, None)
        if self._has_states and num_tokens >= sequence.num_prefill:
            self._give_state(sequence)

    def _retain(self, sequence: Sequence) -> None:
        """Retains a prompt's pages for another engine. The oldest leases end if there would be too many pages.

        A prompt that alone exceeds the limit is not retained; its output then has no `kv_transfer_params`.
        """
        request_id = sequence.request.request_id
        pages = sequence.pages[: self._kv_cache.pages_for(sequence.num_prefill)]
        if self._is_off or len(pages) > self._most_retained:
            return
        checkpoint = self._kv_cache.take_retained_state(sequence)
        if self._has_states and checkpoint is None:  # no slot was free for it
            return
        while self._num_retained + len(pages) > self._most_retained:
            self._expired += 1
            self._drop_retained(next(iter(self._retained)))
        pinned = self._pin(_Pinned(pages, checkpoint=checkpoint))
        self._num_retained += len(pages)
        self._retained[request_id] = _Retained(sequence.key_ids(0, sequence.num_prefill).tolist(), pinned)
        self._retained_leases.open(request_id, time.monotonic(), self._retain_s)

    def _give(self, sequence: Sequence, num_tokens: int, layers: LayerProgress | None) -> None:
        """Hands over tokens that were not handed over before, neither at launch nor when computed."""
        sending = self._sending.get(sequence.request.request_id)
        if sending is None:
            return
        is_whole = num_tokens >= sequence.num_prefill
        end = num_tokens if is_whole else num_tokens - num_tokens % sending.alignment
        if end <= sending.sent:
            return
        pages, serial = list(sequence.pages), next(self._serials)
        self._pins[sending.key, serial] = self._pin(_Pinned(pages[: self._kv_cache.pages_for(end)]))
        self._worker.do(events.Send(sending.key, serial, pages, sending.sent, end, layers))
        sending.sent = end

    def _give_state(self, sequence: Sequence) -> None:
        """Hands over the recurrent state after a prompt, which is at its slot: a prompt of another engine ends with its
        first token, and gets no more rows.
        """
        sending = self._sending.get(sequence.request.request_id)
        if sending is None or sending.has_state:
            return
        serial = next(self._serials)
        self._pins[sending.key, serial] = self._pin(_Pinned([], sequence.slot))
        self._worker.do(events.Send(sending.key, serial, [sequence.slot], 0, 1, pool="states"))
        sending.has_state = True

    def divert(self, outputs: list[Output]) -> list[Output]:
        """Returns the outputs of this engine's own requests. Outputs for other engines are sent to them."""
        if not self._sending and not self._retained:
            return outputs
        return [kept for output in outputs if (kept := self._divert(output)) is not None]

    def _divert(self, output: Output) -> Output | None:
        sending = self._sending.pop(output.request_id, None)
        if sending is None:
            if output.finish_reason is not None and output.request_id in self._retained:
                return self._with_location(output)
            return output
        if output.token_ids and output.finish_reason != "error":
            logprobs = output.logprobs[:1]
            end = events.SendEnd(sending.key, output.token_ids[0], logprobs, output.num_cached_tokens)
            self._worker.do(end)
        else:
            message = output.error or "there is nothing left to compute"
            self._worker.do(events.Refuse(sending.key, "prefill_failed", message))
        return None

    def _with_location(self, output: Output) -> Output:
        if output.finish_reason not in ("stop", "length"):
            self._drop_retained(output.request_id)
            return output
        retained, (host, port) = self._retained[output.request_id], self._advertised
        params: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [retained.pinned.pages],
            "remote_engine_id": self._worker.identity.engine_id,
            "remote_request_id": output.request_id,
            "remote_host": host,
            "remote_port": port,
            "tp_size": self._worker.identity.memory.layout.tp_size,
            "remote_num_tokens": len(retained.token_ids),
        }
        return msgspec.structs.replace(output, kv_transfer_params=params)

    def drop(self, request_id: str) -> None:
        """Frees the retained pages of an aborted request."""
        if request_id in self._retained:
            self._drop_retained(request_id)

    def _drop_retained(self, request_id: str) -> None:
        self._retained_leases.close(request_id)
        self._release_retained(request_id)

    def _release_retained(self, request_id: str) -> None:
        retained = self._retained.pop(request_id)
        self._num_retained -= len(retained.pinned.pages)
        self._unpin(retained.pinned)

    def _grant_read(self, requested: events.KVRequest) -> None:
        if requested.retained_id:
            retained = self._retained.get(requested.retained_id)
            if retained is None:
                message = f"nothing is kept for {requested.retained_id}: its lease has expired, or it was read already"
                self._worker.do(events.Refuse(requested.key, "not_held", message))
                return
            if retained.token_ids != requested.token_ids[: len(retained.token_ids)]:
                message = f"what is kept for {requested.retained_id} is another prompt's"
                self._worker.do(events.Refuse(requested.key, "other_prompt", message))
                return
            self._retained_leases.close(requested.retained_id)
            del self._retained[requested.retained_id]
            self._num_retained -= len(retained.pinned.pages)
            self._pins[requested.key, -1] = retained.pinned  # pinned already
            num_tokens = len(retained.token_ids) - (1 if self._has_states else 0)
            self._worker.do(self._grant(requested.key, retained.pinned, num_tokens))
            return
        self._grant_prefix(requested)

    def _grant_prefix(self, requested: events.KVRequest) -> None:
        if not self._kv_cache.is_caching:
            self._worker.do(events.Refuse(requested.key, "no_prefix_cache", "this engine has no prefix cache"))
            return
        if not self._prefix_loads.begin(requested):
            self._grant_cached(requested)

    def _grant_cached(self, requested: events.KVRequest) -> None:
        root = root_key(self._model_revision, salt=requested.cache_salt)
        pages, num_tokens = self._kv_cache.longest_cached(requested.token_ids, root)
        checkpoint = self._kv_cache.pin_cached_state(requested.token_ids, root, num_tokens)
        pinned = self._pins[requested.key, -1] = self._pin(_Pinned(pages, checkpoint=checkpoint))
        self._next_grants.append(self._grant(requested.key, pinned, num_tokens))

    def _grant(self, key: str, pinned: _Pinned, num_tokens: int) -> events.Grant:
        """Returns the grant of a read. Slots of checkpoints follow those of running sequences."""
        checkpoint = pinned.checkpoint
        state_slot = None if checkpoint is None else self._scheduler.slots.num_slots + checkpoint
        return events.Grant(key, pinned.pages, num_tokens, state_slot)

    # -- Pins

    def _pin(self, pinned: _Pinned) -> _Pinned:
        """Pins pages from token 0 on, for in the prefix cache a block must not outlive the one before it, and a slot.

        Its checkpoint is the caller's already.
        """
        self._kv_cache.pin(pinned.pages)
        self._pinned += len(pinned.pages)
        if pinned.slot is not None:
            self._scheduler.slots.pin(pinned.slot)
        return pinned

    def _unpin(self, pinned: _Pinned) -> None:
        self._kv_cache.unpin(pinned.pages)
        self._pinned -= len(pinned.pages)
        if pinned.slot is not None:
            self._scheduler.slots.unpin(pinned.slot)
        if pinned.checkpoint is not None:
            self._kv_cache.unpin_state(pinned.checkpoint)

    @property
    def stats(self) -> KVTransferStats:
        """Counters of the worker and of this connector. They are read in every step, so they are computed again only
        after a change.
        """
        stats = self._worker.stats
        num_faults = stats.faults + self._faults.num_faults
        seen = (
            stats,
            self._skipped.total(),
            self._expired,
            len(self._retained),
            self._pinned,
            num_faults,
            self._is_off,
        )
        if seen != self._seen:
            self._seen = seen
            fallbacks = Counter(stats.fallbacks)
            fallbacks.update(self._skipped)
            self._stats = replace(
                stats,
                fallbacks=dict(fallbacks),
                leases_expired=stats.leases_expired + self._expired,
                open_leases=stats.open_leases + len(self._retained),
                pinned_pages=self._pinned,
                faults=num_faults,
                has_failed=self._is_off,
            )
        return self._stats
