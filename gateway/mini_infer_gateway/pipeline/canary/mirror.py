"""Sends a copy of an answered request to the new revision, drops the answer, and measures it.

The idea is Envoy's and Istio's request mirroring; unlike theirs a copy leaves only after the original was answered.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from mini_infer_contract.launch import DRAINING_HEADER, REQUEST_ID_HEADER
from mini_infer_gateway.console.request_log import completion_tokens_of
from mini_infer_gateway.http.sse import has_error, without_comments
from mini_infer_gateway.http.upstream import Headers, Upstream, UpstreamError
from mini_infer_gateway.pipeline.call import Copy
from mini_infer_gateway.pipeline.canary.figures import TOO_MANY_REQUESTS, RevisionCounts
from mini_infer_gateway.pipeline.clients import with_fields
from mini_infer_gateway.pipeline.stages.endpoint_request import hints_of
from mini_infer_gateway.routing.base import Decision

COPY_PRIORITY: Final = 1_000_000
"""The `priority` of copies and replays: everything else goes first."""
COPY_TIMEOUT_S: Final = 120.0
"""Seconds that a copy may take; one that takes longer counts as failed."""
_TAIL_BYTES: Final = 2048


class Mirror:
    """Sends copies over the gateway's connections."""

    def __init__(
        self, upstream: Upstream, clock: Callable[[], float], is_timed: Callable[[], bool] = lambda: True
    ) -> None:
        """`is_timed` returns False while latencies say nothing, since the gateway itself keeps the engine busy."""
        self._upstream, self._clock, self.is_timed = upstream, clock, is_timed

    async def send(self, copy: Copy, body: bytes, request_id: str, decision: Decision, counts: RevisionCounts) -> None:
        """Sends one copy to the engines of `decision`, and counts how it went. Raises nothing but CancelledError."""
        try:
            async with asyncio.timeout(COPY_TIMEOUT_S):
                failed = await self._exchange(copy, body, request_id, decision, counts)
        except (UpstreamError, TimeoutError):
            failed = True
        if failed is not None:
            counts.requests += 1
            counts.copies += 1
            counts.errors += failed

    async def _exchange(
        self, copy: Copy, body: bytes, request_id: str, decision: Decision, counts: RevisionCounts
    ) -> bool | None:
        """Returns True if the engine failed the copy; None if it had no room for it, which says nothing."""
        began_s, first_s, tail, last_error = self._clock(), 0.0, b"", False
        headers = [*copy_headers(request_id), *hints_of(decision)]
        endpoint = decision.decode
        response = await self._upstream.request(endpoint.url, "POST", copy.target, headers, body, COPY_TIMEOUT_S)
        try:
            is_stream = response.header(b"content-type").startswith(b"text/event-stream")
            while piece := await response.read(COPY_TIMEOUT_S):
                if is_stream and not first_s and without_comments(piece):
                    first_s = self._clock()
                last_error = last_error or (is_stream and has_error(piece))
                tail = (tail + piece)[-_TAIL_BYTES:]
        finally:
            response.close()
        if response.status == TOO_MANY_REQUESTS or response.header(DRAINING_HEADER.encode()):
            return None
        if response.status >= 400 or last_error:
            return True
        ended_s, tokens = self._clock(), completion_tokens_of(tail)
        if not self.is_timed():
            return False
        if is_stream:
            counts.first_token(first_s - began_s, copy.request.prompt_tokens - decision.hit_tokens)
            if tokens > 1:
                counts.between_tokens((ended_s - first_s) / (tokens - 1))
        elif tokens > 0:
            counts.whole_answer((ended_s - began_s) / tokens)
        return False


def copied_body(body: bytes, model: str, fields: dict[str, Any], *, has_priorities: bool) -> bytes:
    """Returns the body of a copy: for `model`, behind all other work, and with the number of tokens at a stream's end.

    `has_priorities` is True for engines of this project; others may refuse the field.
    """
    changed: dict[str, Any] = {"model": model}
    if has_priorities:
        changed["priority"] = COPY_PRIORITY
    if fields.get("stream") is True:
        changed["stream_options"] = {"include_usage": True}
    return with_fields(body, changed)


def copy_headers(request_id: str) -> Headers:
    """Returns the headers of a request that the gateway sends itself."""
    return [(b"content-type", b"application/json"), (REQUEST_ID_HEADER.encode(), f"canary-{request_id}".encode())]
