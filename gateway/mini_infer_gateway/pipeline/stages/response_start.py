"""Reads the start of an endpoint's response, and judges it before anything is sent to the client.

The start is a small body as a whole, or the first events of a stream: an endpoint that fails before that can be
replaced by another.
"""

import asyncio
from dataclasses import dataclass

from mini_infer_contract.launch import DRAINING_HEADER, KV_FALLBACK_HEADER, SLO_UNATTAINABLE_HEADER
from mini_infer_gateway.fleet.attempt_record import AttemptRecord
from mini_infer_gateway.http.sse import EventSplitter, without_comments
from mini_infer_gateway.http.upstream import Response
from mini_infer_gateway.memory import BodyBudget
from mini_infer_gateway.pipeline.retries import Failure
from mini_infer_web.asgi import PIECE_BYTES

WHOLE_BYTES = 1 << 20
"""Largest response of known length that is read whole before it is sent on: until then the request can be retried."""

_DRAINING, _KV_FALLBACK = DRAINING_HEADER.encode(), KV_FALLBACK_HEADER.encode()
_SLO_UNATTAINABLE = SLO_UNATTAINABLE_HEADER.encode()
_ENGINE_DEAD = b'"engine_dead"'
_SERVER_ERRORS = frozenset((500, 502, 503, 504))
_OVERLOADED = 429


@dataclass(frozen=True, slots=True)
class ResponseStart:
    """A response whose head and first bytes have arrived."""

    response: Response
    splitter: EventSplitter | None
    """The splitter of an event stream; None if the response is something else."""
    body: bytes
    """The whole body if `is_whole`, otherwise its first piece."""
    is_whole: bool

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.response.status

    @property
    def is_stream(self) -> bool:
        """True if the request succeeds with an event stream."""
        return self.splitter is not None and self.response.status == 200

    @property
    def is_refusal(self) -> bool:
        """True if the endpoint does not accept such a request."""
        return 400 <= self.status < 500 and self.status != _OVERLOADED

    @property
    def kv_fallback(self) -> str:
        """The reason why the endpoint computed the prompt itself although another one was to; empty if none."""
        return self.response.header(_KV_FALLBACK).decode("latin-1")

    @property
    def failure(self) -> Failure | None:
        """The failure of the endpoint that the response shows; None if nothing is wrong with the endpoint."""
        if self.status == _OVERLOADED:
            return Failure.UNATTAINABLE if self.response.header(_SLO_UNATTAINABLE) else Failure.OVERLOADED
        if self.status not in _SERVER_ERRORS:
            return None
        if self.response.header(_DRAINING):
            return Failure.DRAINING
        return Failure.DIED if _ENGINE_DEAD in self.body else Failure.STATUS


async def read_start(
    response: Response, first_event_by_s: float, record: AttemptRecord, idle_timeout_s: float, bodies: BodyBudget
) -> ResponseStart:
    """Reads up to the end of a small body, or up to the first whole event or piece. Raises UpstreamError.

    While memory for `bodies` is short, only the smallest bodies are read whole.
    """
    whole_bytes = PIECE_BYTES if bodies.is_tight else WHOLE_BYTES
    length, splitter = response.header(b"content-length"), EventSplitter() if _is_event_stream(response) else None
    piece = await response.read(idle_timeout_s)
    if length.isdigit() and int(length) <= whole_bytes:
        pieces = []
        while piece:
            record.byte()
            pieces.append(piece)
            piece = await response.read(idle_timeout_s)
        return ResponseStart(response, splitter, b"".join(pieces), is_whole=True)
    if splitter is None:
        return ResponseStart(response, None, piece, is_whole=not piece)
    while piece:
        # Comments before the first event are dropped: they only show a live endpoint.
        if events := without_comments(splitter.feed(piece)):
            return ResponseStart(response, splitter, events, is_whole=False)
        left_s = first_event_by_s - asyncio.get_running_loop().time()
        piece = await response.read(min(idle_timeout_s, max(0.0, left_s)))
    return ResponseStart(response, splitter, splitter.rest(), is_whole=True)


def _is_event_stream(response: Response) -> bool:
    return response.header(b"content-type").lower().startswith(b"text/event-stream")
