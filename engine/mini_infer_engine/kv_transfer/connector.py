"""The core's end of KV transfer: which pages are pinned for whom, and what the scheduler is told. See `KVConnector`.

Everything here runs in the core's thread; the transfer thread is reached by `TransferWorker.do` and `events`.
"""

import itertools
import queue
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from mini_infer_contract.blocks import root_key
from mini_infer_engine.core.kv_transfer import NO_TRANSFERS, KVTransferStats, LayerProgress, NotReceived, Received, Work
from mini_infer_engine.core.request import Output, Request
from mini_infer_engine.core.scheduler import Scheduler
from mini_infer_engine.core.sequence import Sequence
from mini_infer_engine.kv_transfer import events
from mini_infer_engine.kv_transfer.leases import LeaseTable
from mini_infer_engine.kv_transfer.worker import TransferWorker

_PREFIX = "kv-transfer/"
"""Of the ids of requests that other engines have sent; clients' ids have a # in them."""
_HELD_FACTOR = 6.0
"""Leases that a prompt is kept for whoever its proxy sends: the proxy may take its time, and nobody renews."""


@dataclass(slots=True)
class _Taking:
    request_id: str
    pages: list[int]
    """Pinned."""


@dataclass(slots=True)
class _Giving:
    key: str
    sent: int
    """Tokens that the taker has, or that have been handed to the transfer thread."""
    alignment: int


@dataclass(slots=True)
class _Held:
    token_ids: list[int]
    pages: list[int]
    """Pinned."""


class TransferConnector:
    """See `core.kv_transfer.KVConnector`."""

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
    ) -> None:
        """`advertised`: host and port that others reach the transfer port by."""
        self.falls_back = falls_back
        self._worker, self._scheduler, self._pool = worker, scheduler, scheduler.pool
        self._model_revision = model_revision
        self._advertised = advertised
        self._lease_s = lease_s
        self._queued_tokens = queued_tokens
        self._jobs = itertools.count()
        self._serials = itertools.count()
        self._taking: dict[int, _Taking] = {}
        self._giving: dict[str, _Giving] = {}
        """By request id."""
        self._held: dict[str, _Held] = {}
        self._held_leases: LeaseTable[str] = LeaseTable()
        self._pins: dict[tuple[str, int], list[int]] = {}
        """Pages that are written from or read by others, by key and serial; -1 for a grant."""
        self._next_grants: list[events.Grant] = []
        """Cached blocks may be what a launched pass is still writing: they are granted once that is done."""
        self._skipped: Counter[str] = Counter()
        self._expired = 0
        self._seen: tuple[KVTransferStats, int, int, int, int] | None = None
        self._stats = NO_TRANSFERS
        self._pinned = 0

    # -- Taking

    def refuses(self, request: Request) -> str:
        """See `KVConnector.refuses`."""
        sampling = request.sampling
        if sampling.prompt_logprobs is not None:
            return "prompt_logprobs"
        if request.embeds:
            return "embedding"
        if request.beam_search is not None:
            return "beam_search"
        return ""

    def skip(self, reason: str) -> None:
        """See `KVConnector.skip`."""
        self._skipped[reason] += 1

    def receive(self, sequence: Sequence) -> None:
        """See `KVConnector.receive`."""
        source, job, request = sequence.kv_source, next(self._jobs), sequence.request
        assert source is not None
        first = sequence.num_computed
        mine = sequence.pages[first // self._pool.page_size :]
        self._pin(mine)
        self._taking[job] = _Taking(request.request_id, mine)
        known = sequence.token_ids[sequence.num_prompt :].tolist()
        wanted = msgspec.structs.replace(
            request,
            prompt_token_ids=list(request.prompt_token_ids),
            resumed_token_ids=known,
            sampling=msgspec.structs.replace(request.sampling, max_tokens=len(known) + 1),
            kv_source=None,
            holds_kv=False,
        )
        pages, num_tokens = list(sequence.pages), len(sequence.token_ids)
        self._worker.do(events.Take(job, wanted, source, pages, first, num_tokens))

    def cancel(self, sequence: Sequence) -> None:
        """See `KVConnector.cancel`."""
        for job, taking in self._taking.items():
            if taking.request_id == sequence.request.request_id:
                self._worker.do(events.Cancel(job))

    def has_news(self, now_s: float) -> bool:
        """See `KVConnector.has_news`."""
        worker = self._worker
        has_events = self._next_grants or not worker.events.empty() or worker.failure is not None
        return bool(has_events) or self._held_leases.has_expired(now_s)

    def take(self, now_s: float, prefill_tokens_per_s: float) -> Work:
        """See `KVConnector.take`. RuntimeError: the transfer thread has failed."""
        if self._worker.failure is not None:
            raise RuntimeError(f"KV transfer has failed: {self._worker.failure}") from self._worker.failure
        for request_id in self._held_leases.expire(now_s):
            self._expired += 1
            self._unpin(self._held.pop(request_id).pages)
        for grant in self._next_grants:
            self._worker.do(grant)
        self._next_grants.clear()
        work = Work()
        self._worker.drain_wakes()
        while True:
            try:
                event = self._worker.events.get_nowait()
            except queue.Empty:
                break
            self._handle(event, work)
        load = self._worker.load
        load.queued_tokens, load.prefill_tokens_per_s = self._queued_tokens(), prefill_tokens_per_s
        return work

    def _handle(self, event: events.Event, work: Work) -> None:
        match event:
            case events.Taken(job, num_tokens, token_id, logprobs, num_cached):
                if token_id is None:  # all is there, and the last known token is computed for what follows it
                    num_tokens = min(num_tokens, self._known(job) - 1)
                work.came.append(Received(self._taking[job].request_id, num_tokens, token_id, logprobs, num_cached))
            case events.NotTaken(job, reason, message):
                work.came.append(NotReceived(self._taking[job].request_id, reason, message))
            case events.Settled(job):
                self._unpin(self._taking.pop(job).pages)
            case events.PrefillAsked(key, request, first_token, alignment):
                request_id = _PREFIX + key
                self._giving[request_id] = _Giving(key, first_token, alignment)
                work.accepted.append(request.request_id)
                work.add.append(msgspec.structs.replace(request, request_id=request_id))
            case events.KVAsked():
                self._let_read(event)
            case events.Given(key, serial):
                self._unpin(self._pins.pop((key, serial)))
            case events.Gone(key):
                if self._giving.pop(_PREFIX + key, None) is not None:
                    work.abort.append(_PREFIX + key)
                self._unpin(self._pins.pop((key, -1), []))

    def _known(self, job: int) -> int:
        """Tokens of the sequence of a job."""
        request_id = self._taking[job].request_id
        for sequence in self._scheduler.receiving:
            if sequence.request.request_id == request_id:
                return len(sequence.token_ids)
        return 1  # it was aborted

    # -- Giving

    def accept_failed(self, request_id: str, message: str) -> None:
        """See `KVConnector.accept_failed`."""
        giving = self._giving.pop(request_id)
        self._worker.do(events.Refuse(giving.key, "refused_request", message))

    def gives(self, sequence: Sequence) -> bool:
        """See `KVConnector.gives`."""
        return sequence.request.request_id in self._giving

    def launched(self, sequence: Sequence, num_tokens: int, layers: LayerProgress) -> None:
        """See `KVConnector.launched`."""
        self._give(sequence, num_tokens, layers)

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        """See `KVConnector.computed`."""
        request = sequence.request
        if request.holds_kv and num_tokens >= sequence.num_prefill and request.request_id not in self._held:
            pages = sequence.pages[: self._pool.pages_for(sequence.num_prefill)]
            self._pin(pages)
            self._held[request.request_id] = _Held(sequence.token_ids[: sequence.num_prefill].tolist(), pages)
            self._held_leases.open(request.request_id, time.monotonic(), self._lease_s * _HELD_FACTOR)
        self._give(sequence, num_tokens, None)

    def _give(self, sequence: Sequence, num_tokens: int, layers: LayerProgress | None) -> None:
        """Hand on what is new, once; what was given as it was launched is not given again as it is computed."""
        giving = self._giving.get(sequence.request.request_id)
        if giving is None:
            return
        is_whole = num_tokens >= sequence.num_prefill
        end = num_tokens if is_whole else num_tokens - num_tokens % giving.alignment
        if end <= giving.sent:
            return
        first_page = giving.sent // self._pool.page_size
        pages, serial = list(sequence.pages), next(self._serials)
        pinned = pages[first_page : self._pool.pages_for(end)]
        self._pin(pinned)
        self._pins[giving.key, serial] = pinned
        self._worker.do(events.Give(giving.key, serial, pages, giving.sent, end, layers))
        giving.sent = end

    def divert(self, outputs: list[Output]) -> list[Output]:
        """See `KVConnector.divert`."""
        if not self._giving and not self._held:
            return outputs
        return [told for output in outputs if (told := self._divert(output)) is not None]

    def _divert(self, output: Output) -> Output | None:
        giving = self._giving.pop(output.request_id, None)
        if giving is None:
            if output.finish_reason is not None and output.request_id in self._held:
                return self._tell_where(output)
            return output
        if output.token_ids and output.finish_reason != "error":
            logprobs = output.logprobs[:1]
            end = events.GiveEnd(giving.key, output.token_ids[0], logprobs, output.num_cached_tokens)
            self._worker.do(end)
        else:
            message = output.error or "there is nothing left to compute"
            self._worker.do(events.Refuse(giving.key, "prefill_failed", message))
        return None

    def _tell_where(self, output: Output) -> Output:
        if output.finish_reason not in ("stop", "length"):
            self._drop_held(output.request_id)
            return output
        held, (host, port) = self._held[output.request_id], self._advertised
        params: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [held.pages],
            "remote_engine_id": self._worker.identity.engine_id,
            "remote_request_id": output.request_id,
            "remote_host": host,
            "remote_port": port,
            "tp_size": self._worker.identity.memory.layout.tp_size,
            "remote_num_tokens": len(held.token_ids),
        }
        return msgspec.structs.replace(output, kv_transfer_params=params)

    def drop(self, request_id: str) -> None:
        """See `KVConnector.drop`."""
        if request_id in self._held:
            self._drop_held(request_id)

    def _drop_held(self, request_id: str) -> None:
        self._held_leases.close(request_id)
        self._unpin(self._held.pop(request_id).pages)

    def _let_read(self, asked: events.KVAsked) -> None:
        if asked.held_id:
            held = self._held.get(asked.held_id)
            if held is None:
                message = f"nothing is kept for {asked.held_id}: its lease has expired, or it was read already"
                self._worker.do(events.Refuse(asked.key, "not_held", message))
                return
            if held.token_ids != asked.token_ids[: len(held.token_ids)]:
                message = f"what is kept for {asked.held_id} is another prompt's"
                self._worker.do(events.Refuse(asked.key, "other_prompt", message))
                return
            self._held_leases.close(asked.held_id)
            del self._held[asked.held_id]
            self._pins[asked.key, -1] = held.pages  # pinned already
            self._worker.do(events.Grant(asked.key, held.pages, len(held.token_ids)))
            return
        self._grant_prefix(asked)

    def _grant_prefix(self, asked: events.KVAsked) -> None:
        cache = self._scheduler.cache
        if cache is None:
            self._worker.do(events.Refuse(asked.key, "no_prefix_cache", "this engine has no prefix cache"))
            return
        pages, num_tokens = cache.longest(asked.token_ids, root_key(self._model_revision, salt=asked.cache_salt))
        self._pin(pages)
        self._pins[asked.key, -1] = pages
        self._next_grants.append(events.Grant(asked.key, pages, num_tokens))

    # -- Pins

    def _pin(self, pages: list[int]) -> None:
        for page in pages:
            self._pool.acquire(page)
        self._pinned += len(pages)

    def _unpin(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self._pool.release(page)
        self._pinned -= len(pages)

    @property
    def stats(self) -> KVTransferStats:
        """See `KVConnector.stats`. Asked for in every step, and made anew where something has changed."""
        stats = self._worker.stats
        seen = (stats, self._skipped.total(), self._expired, len(self._held), self._pinned)
        if seen != self._seen:
            self._seen = seen
            fallbacks = Counter(stats.fallbacks)
            fallbacks.update(self._skipped)
            self._stats = replace(
                stats,
                fallbacks=dict(fallbacks),
                leases_expired=stats.leases_expired + self._expired,
                open_leases=stats.open_leases + len(self._held),
                pinned_pages=self._pinned,
            )
        return self._stats
