"""Requests between their submission and their last output, and what a caller gets of them. Runs no engine."""

import time
from collections.abc import Iterable, Sequence

import msgspec

from mini_infer_engine.core.request import Output, Request
from mini_infer_engine.offline.outputs import CompletionOutput, RequestOutput
from mini_infer_engine.offline.prompts import OfflinePrompt
from mini_infer_engine.offline.reply import LogprobReader, Reply
from mini_infer_engine.offline.sampling_params import RequestOutputKind
from mini_infer_engine.text.detokenizer import Decoder


class PendingRequest:
    """One prompt's core requests, one for each of its outputs, and the reply to each."""

    kind = RequestOutputKind.FINAL_ONLY

    def __init__(self, request_id: str, requests: Sequence[Request]) -> None:
        self.request_id = request_id
        self.requests = requests
        self.arrival_time, self.arrived_s = time.time(), time.monotonic()
        """The time of day, and the same moment by the monotonic clock."""
        self.replies: list[Reply] = []
        """Empty until the first step after its submission."""
        self.running = len(requests)
        """Number of replies that have not ended."""
        self.error: Exception | None = None
        """The first error that ended one of its replies."""

    @property
    def finished(self) -> bool:
        """True if every reply has ended."""
        return not self.running


class PendingGeneration(PendingRequest):
    """A prompt whose texts are generated."""

    def __init__(
        self,
        request_id: str,
        requests: Sequence[Request],
        prompt: OfflinePrompt,
        kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY,
    ) -> None:
        super().__init__(request_id, requests)
        self.kind = kind
        self._prompt = prompt
        self._reported: list[tuple[int, bool]] = [(0, False)] * len(requests)
        """Tokens of each choice that earlier outputs had, and whether they had its end; for deltas alone."""
        self._reported_prompt = 0
        """Positions of the prompt whose log probabilities earlier outputs had."""

    @property
    def has_output(self) -> bool:
        """True if the caller is to get an output now: the last one, or any if it did not ask for that alone."""
        return self.finished or self.kind is not RequestOutputKind.FINAL_ONLY

    def output(self) -> RequestOutput:
        """Returns all so far, or with deltas what is new since the last call."""
        first = self.replies[0]
        prompt_logprobs = first.prompt_logprobs_by_token()
        if self.kind is RequestOutputKind.DELTA:
            outputs = [one for index in range(len(self.replies)) if (one := self._delta(index)) is not None]
            if prompt_logprobs is not None:
                known = len(prompt_logprobs)
                prompt_logprobs = prompt_logprobs[self._reported_prompt :]
                self._reported_prompt = known
        else:
            outputs = [_completion(index, reply, reply.text) for index, reply in enumerate(self.replies)]
        return RequestOutput(
            self.request_id,
            self._prompt.text,
            list(self._prompt.token_ids),
            outputs,
            self.finished,
            first.num_cached_tokens,
            prompt_logprobs,
            first.stats,
            first.cached_tokens,
        )

    def _delta(self, index: int) -> CompletionOutput | None:
        """Returns what is new of a choice; None if nothing is."""
        reply = self.replies[index]
        now = len(reply.token_ids), reply.finish_reason is not None
        if now == self._reported[index]:
            return None
        (seen, _), self._reported[index] = self._reported[index], now
        whole = _completion(index, reply, reply.take_new_text())
        logprobs = whole.logprobs and whole.logprobs[seen:]
        return msgspec.structs.replace(whole, token_ids=reply.token_ids[seen:], logprobs=logprobs)


class RequestsInFlight:
    """The requests that an engine works on, by the ids of their core requests."""

    def __init__(self, decoder: Decoder | None) -> None:
        self._decoder, self._logprobs = decoder, LogprobReader(decoder)
        self._new: list[PendingRequest] = []
        self._owners: dict[str, PendingRequest] = {}
        self._replies: dict[str, Reply] = {}

    def __len__(self) -> int:
        """Returns the number of replies that have not ended."""
        return len(self._owners)

    def add(self, pending: PendingRequest) -> None:
        """Adds a request before its first step. Raises ValueError if one of its ids is in use."""
        for request in pending.requests:
            if request.request_id in self._owners:
                raise ValueError(f"request id {pending.request_id!r} is in use: choose another")
        for request in pending.requests:
            self._owners[request.request_id] = pending
        self._new.append(pending)

    def left_of(self, pending: PendingRequest) -> list[str]:
        """Returns the ids of a request's core requests that have not ended."""
        if pending.finished:
            return []
        return [one.request_id for one in pending.requests if self._owners.get(one.request_id) is pending]

    def remove(self, pending: PendingRequest) -> list[str]:
        """Forgets a request, and returns what `left_of` returned."""
        left = self.left_of(pending)
        for request_id in left:
            del self._owners[request_id]
            self._replies.pop(request_id, None)
        if pending in self._new:
            self._new.remove(pending)
        return left

    def take(self, outputs: Iterable[Output]) -> tuple[list[PendingRequest], list[str]]:
        """Takes a step's outputs. Returns the requests of which a reply has ended, or which report every step, and the
        ids of core requests whose text has ended while the engine still computes them.

        Replies are made here, after the first step of their requests: a device computes meanwhile.
        """
        if self._new:
            self._make_replies()
        now_s = time.monotonic()
        changed: dict[PendingRequest, None] = {}
        to_abort = []
        for output in outputs:
            request_id = output.request_id
            reply = self._replies.get(request_id)
            if reply is None:
                continue
            reply.take(output, now_s)
            if reply.finish_reason is not None:
                pending = self._owners.pop(request_id)
                del self._replies[request_id]
                pending.running -= 1
                pending.error = pending.error or reply.fault()
                if reply.needs_abort:
                    to_abort.append(request_id)
                changed[pending] = None
            elif reply.reports_steps:
                changed[self._owners[request_id]] = None
        return list(changed), to_abort

    def _make_replies(self) -> None:
        for pending in self._new:
            for request in pending.requests:
                reply = Reply(
                    request, self._decoder, self._logprobs, pending.arrival_time, pending.arrived_s, pending.kind
                )
                pending.replies.append(reply)
                self._replies[request.request_id] = reply
        self._new.clear()


def _completion(index: int, reply: Reply, text: str) -> CompletionOutput:
    completion = CompletionOutput(index, text, list(reply.token_ids), reply.finish_reason, reply.stop_reason)
    if reply.request.sampling.logprobs is None:
        return completion
    total = sum(position.logprob for position in reply.logprobs)
    return msgspec.structs.replace(completion, cumulative_logprob=total, logprobs=list(reply.logprobs_by_token))
