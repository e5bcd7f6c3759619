"""One HTTP request in progress: its choices, their new deltas, and the task that waits for those. Knows no HTTP."""

import asyncio
import time
from collections.abc import Callable, Sequence
from math import ceil

from mini_infer_contract.launch import SLO_UNATTAINABLE_HEADER
from mini_infer_engine.api.metrics import ServerMetrics
from mini_infer_engine.api.vllm_metrics import FinishedChoice
from mini_infer_engine.core.request import Output, Request
from mini_infer_engine.parsing.base import OutputParser
from mini_infer_engine.text.detokenizer import Decoder
from mini_infer_engine.text.output_text import Delta, OutputText
from mini_infer_web.api_errors import ApiError


class Generation:
    """The choices of one request. The client of the core pushes outputs, one task waits for them."""

    def __init__(
        self,
        requests: Sequence[Request],
        decoder: Decoder | None,
        metrics: ServerMetrics,
        *,
        streams: bool,
        streams_every_step: bool = False,
        make_parser: Callable[[Request], OutputParser] | None = None,
        copies: int = 1,
    ) -> None:
        """Takes `make_parser`, which makes the parser of one choice's output; if None, the output is text.

        `copies`: choices of each prompt.
        """
        self.replies = [OutputText(request, decoder, make_parser and make_parser(request)) for request in requests]
        self.error: ApiError | None = None
        """The error for which it cannot go on."""
        self.cancelled = False
        """True if its client is gone."""
        self.engines = [0] * len(self.replies)
        """Index of the server's engine that runs each choice."""
        self._streams = streams
        self._streams_every_step = streams_every_step
        """True if steps without text have deltas, too."""
        self._deltas: list[Delta] = []
        self._unfinished = len(self.replies)
        self._waiter: asyncio.Future[None] | None = None
        self._metrics = metrics
        self._arrived_at = time.perf_counter()
        self._arrived_s = time.monotonic()
        self.kv_fallback = ""
        """The reason why its prompt is computed here though another engine was named for it."""
        self.first_token_s: float | None = None
        """Seconds from its arrival to the first token of any choice."""
        self._first_token_at = [0.0] * len(self.replies)
        self._last_token_at = [0.0] * len(self.replies)
        self._copies = copies
        self._counted: set[int] = set()
        for index, reply in enumerate(self.replies):
            if reply.finish_reason is not None:  # Resumed after its end.
                self._unfinished -= 1
                self._deltas.append(Delta("", [], index, reply.finish_reason, reply.stop_reason))

    @property
    def is_over(self) -> bool:
        """True if no more outputs will come."""
        return self._unfinished == 0 or self.error is not None or self.cancelled

    def push(self, index: int, output: Output, now: float) -> bool:
        """Takes the output of a step for choice `index`. Returns True if the core should stop working on it."""
        if output.kv_fallback:
            self.kv_fallback = output.kv_fallback
            return False
        reply = self.replies[index]
        delta = reply.push(output)
        delta.index = index
        self._measure(index, len(delta.token_ids), now)
        if reply.finish_reason is not None:
            self._unfinished -= 1
            self._count(index, reply.finish_reason, now, output.queue_time_s)
            if reply.finish_reason == "error":
                self.fail(_error_of(reply))  # told as an error, with its own status where nothing was told yet
                return reply.needs_abort
        is_news = bool(delta.text) if reply.parsed is None else bool(delta.parts)
        if self._streams and (is_news or reply.finish_reason is not None or self._streams_every_step):
            self._deltas.append(delta)
            self._wake()
        elif self.is_over:
            self._wake()
        return reply.needs_abort

    def _measure(self, index: int, num_tokens: int, now: float) -> None:
        if not num_tokens:
            return
        last, reply = self._last_token_at[index], self.replies[index]
        metrics = self._metrics.engines[self.engines[index]]
        reply.last_token_s = now - self._arrived_at
        if reply.first_token_s is None:
            reply.first_token_s = reply.last_token_s
        if last:
            metrics.inter_token_latency.observe((now - last) / num_tokens, num_tokens)
        else:
            self._first_token_at[index] = now
            metrics.time_to_first_token.observe(now - self._arrived_at)
            if self.first_token_s is None:
                self.first_token_s = now - self._arrived_at
        self._last_token_at[index] = now
        metrics.generation_tokens += num_tokens

    def fail(self, error: ApiError) -> None:
        """Ends it with an error: the core cannot go on."""
        self.error = self.error or error
        self._wake()

    def cancel(self) -> None:
        """Ends it: its client has left."""
        self.cancelled = True
        self._wake()

    def count_unfinished(self) -> None:
        """Counts choices that have not ended, when the request is over for its client: they were
        aborted, or broke off.
        """
        reason = "error" if self.error is not None else "abort"
        for index, reply in enumerate(self.replies):
            if reply.finish_reason is None:
                self._count(index, reason, time.perf_counter(), None)

    def _count(self, index: int, reason: str, now: float, queue_time_s: float | None) -> None:
        reply, first = self.replies[index], self._first_token_at[index]
        metrics = self._metrics.engines[self.engines[index]]
        metrics.count_choice(
            FinishedChoice(
                # In metrics a call of tools is a stop, as the engine's own reason and vLLM's label are.
                reason="stop" if reason == "tool_calls" else reason,
                duration_s=now - self._arrived_at,
                prompt_tokens=len(reply.request.prompt_token_ids),
                cached_tokens=reply.num_cached_tokens,
                output_tokens=len(reply.token_ids),
                max_tokens=reply.request.sampling.max_tokens,
                queue_time_s=queue_time_s,
                first_token_s=first - self._arrived_at if first else None,
                last_token_s=self._last_token_at[index] - self._arrived_at,
            )
        )
        self._count_targets(index, reason, now)
        start = index - index % self._copies
        of_prompt = range(start, start + self._copies)
        self._counted.add(index)
        if self._counted.issuperset(of_prompt):
            most = max(len(self.replies[one].token_ids) for one in of_prompt)
            metrics.count_prompt(self._copies, most)

    def _count_targets(self, index: int, reason: str, now: float) -> None:
        """Counts which of its latency targets a choice has met. One that its client or an error ended counts for none,
        and one that was refused for its targets as refused.
        """
        reply = self.replies[index]
        metrics, targets = self._metrics.engines[self.engines[index]], reply.request.targets
        if reply.retry_after_s is not None:
            metrics.slo_refusals += 1
        if reason in ("error", "abort"):
            return
        earlier_s = self._arrived_s - targets.since_s if targets.since_s else 0.0
        first, num_tokens = self._first_token_at[index], len(reply.token_ids)
        if first and num_tokens > 1:
            metrics.count_target("itl", targets.itl_ms, (self._last_token_at[index] - first) / (num_tokens - 1))
        metrics.count_target("ttft", targets.ttft_ms, (first or now) - self._arrived_at + earlier_s)
        metrics.count_target("deadline", targets.deadline_ms, now - self._arrived_at + earlier_s)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def deltas(self) -> list[Delta]:
        """Returns the deltas since the last call, in order; waits while there are none. Empty if it is over."""
        while not self._deltas and not self.is_over:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        deltas, self._deltas = self._deltas, []
        return deltas

    async def finished(self) -> None:
        """Waits for the end, whatever it is."""
        while not self.is_over:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter


def _error_of(reply: OutputText) -> ApiError:
    """Returns the error for the client: a refusal names the parameter, anything else is the engine's own fault."""
    if reply.is_refused:
        return ApiError(400, reply.error, param=reply.error.split(" ", 1)[0], code="unsupported_value")
    if reply.retry_after_s is not None:
        headers = {"retry-after": str(max(1, ceil(reply.retry_after_s))), SLO_UNATTAINABLE_HEADER: "true"}
        return ApiError(429, reply.error, code="slo_unattainable", headers=headers)
    return ApiError(500, reply.error, code="engine_error")
