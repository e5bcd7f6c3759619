"""Sends one attempt of a request to one endpoint, and decides what its end means for the request.

`endpoint_request` writes what the endpoint receives, `response_start` reads the beginning of its answer, and `relay`
sends that on to the client. An attempt that fails before its first byte may be retried, and a stream that loses its
endpoint may be resumed.
"""

import asyncio
import logging
from dataclasses import dataclass

from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.fleet.attempt_record import AttemptRecord
from mini_infer_gateway.flow_control.controller import Placement
from mini_infer_gateway.http.asgi import ClientDisconnectedError
from mini_infer_gateway.http.upstream import BrokenConnectionError, Response, UpstreamError
from mini_infer_gateway.metrics import Outcome
from mini_infer_gateway.pipeline.call import Call
from mini_infer_gateway.pipeline.errors import attempts_failed, endpoint_failed
from mini_infer_gateway.pipeline.retries import CAUSE, AttemptError, Failure, failure_of
from mini_infer_gateway.pipeline.serving import Serving
from mini_infer_gateway.pipeline.stages.endpoint_request import write_request
from mini_infer_gateway.pipeline.stages.first_byte import record_first_byte
from mini_infer_gateway.pipeline.stages.relay import relay, relay_rest
from mini_infer_gateway.pipeline.stages.response_start import ResponseStart, read_start
from mini_infer_gateway.pipeline.stages.retry import may_retry, record_failure

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamCut:
    """The loss of the endpoint of a stream that can be continued; the client has not been notified."""

    endpoint: Endpoint
    detail: str
    died: bool = False
    """True if the connection broke, so that the request may be what ended the engine."""
    refused: bool = False
    """True if the endpoint does not accept such a request."""


async def attempt(call: Call, placement: Placement, serving: Serving) -> StreamCut | None:
    """Sends the request to the endpoint of `placement`, whose load includes it already, and finishes the placement.

    Returns the cut of a stream that is to be resumed. Returns None if the answer was relayed, and also if nothing was
    sent to the client and another attempt is to follow. Raises ApiError if no attempt is left, UpstreamError if the
    endpoint failed later (the client has been notified), and ClientDisconnectedError.
    """
    try:
        # The endpoint may have been removed after the request was placed there.
        if placement.decision.decode.name in serving.fleet.endpoints:
            call.attempts += 1
            return await Attempt(call, placement, serving).run()
    except AttemptError as failed:
        log.info("request %s: %s", call.request_id, failed)
        if not failed.again:
            raise attempts_failed(call.model, call.kills, failed) from failed
        serving.metrics.retried(failed.failure.value)
        call.request = call.request.excluding(placement.decision)
    finally:
        serving.flow.finish(placement)
    return None


class Attempt:
    """One attempt at one endpoint; the fleet may move it to another endpoint."""

    __slots__ = ("_call", "_endpoint", "_moved", "_placement", "_record", "_serving")

    _call: Call
    _placement: Placement
    _serving: Serving
    _endpoint: Endpoint
    _record: AttemptRecord
    _moved: Failure | None
    """The reason why the attempt was moved away from its endpoint."""

    def __init__(self, call: Call, placement: Placement, serving: Serving) -> None:
        self._call, self._placement, self._serving = call, placement, serving
        self._endpoint, self._moved = placement.decision.decode, None

    async def run(self) -> StreamCut | None:
        """Runs the attempt, and returns the cut of a stream that is to be resumed.

        Raises AttemptError while the client has received nothing, UpstreamError, and ClientDisconnectedError.
        """
        call, placement, serving, now_s = self._call, self._placement, self._serving, self._serving.clock()
        serving.metrics.decided(placement.decision.reason)
        call.trace.sent(placement.decision, placement.waited_s, now_s)
        if not call.request.attempted:
            serving.metrics.overhead(now_s - call.arrived_s - placement.waited_s)
        write_request(call, placement, serving)
        self._record = serving.fleet.begin(self._endpoint.name, self)
        outcome = Outcome.INTERNAL
        try:
            cut = await self._exchange(self._head_timeout_s(now_s))
            outcome = Outcome.CONTINUED if cut else call.exchange.outcome
            if cut:
                call.trace.failed("stream_cut", serving.clock())
            return cut
        except AttemptError as failed:
            outcome = Outcome.RETRIED if failed.again else Outcome.BROKE
            call.trace.failed(failed.failure.value, serving.clock())
            raise
        except UpstreamError:
            outcome = Outcome.BROKE
            raise
        except (ClientDisconnectedError, asyncio.CancelledError):
            outcome = Outcome.CLIENT_DISCONNECTED
            raise
        finally:
            if self._endpoint.name in serving.fleet.endpoints:
                serving.metrics.attempted(self._endpoint.name, outcome)
            self._record.close()

    @property
    def can_resume(self) -> bool:
        """True if the client has received a part of a stream that another endpoint can continue."""
        return self._call.can_resume

    def move(self, reason: str) -> None:
        """Gives up the endpoint for another one, if there is one and nothing is lost by it.

        `reason` is the value of a `Failure`.
        """
        failure, exchange = Failure(reason), self._call.exchange
        if exchange.abandoned:
            return
        if self.can_resume:
            gives_up = exchange.response is not None
        else:
            gives_up = not exchange.status and self._moved is None and self._may_retry(failure)
        if gives_up:
            self._moved = failure
            exchange.cut()

    async def _exchange(self, head_timeout_s: float) -> StreamCut | None:
        """Sends the request and relays the response."""
        call, exchange, idle_timeout_s = self._call, self._call.exchange, self._serving.settings.idle_timeout_s
        start_by_s = asyncio.get_running_loop().time() + head_timeout_s
        try:
            response = await self._serving.upstream.request(
                self._endpoint.url,
                exchange.method,
                exchange.target,
                exchange.headers + exchange.hints,
                exchange.body,
                head_timeout_s,
                on_connection=self._connected,
            )
            try:
                bodies = self._serving.bodies
                start = await read_start(response, start_by_s, self._record, idle_timeout_s, bodies)
                return await self._answer(start)
            finally:
                exchange.response = None
                response.close()
        except UpstreamError as error:
            if exchange.abandoned:
                raise ClientDisconnectedError from None
            if not exchange.status:
                raise self._failed(error) from error
            self._record.failed(CAUSE[failure_of(error)])
            if not call.can_resume:
                if exchange.is_events:
                    await exchange.send_error_event(endpoint_failed(str(error)))
                raise
            died = isinstance(error, BrokenConnectionError) and self._moved is None
            return StreamCut(self._endpoint, f"{self._endpoint.name}: {error}", died=died)

    async def _answer(self, start: ResponseStart) -> StreamCut | None:
        """Relays a response, unless another endpoint is to answer instead.

        If no retry is left, the client receives even a 503, unless the 503 reports that the engine has ended.
        """
        call, name, failure = self._call, self._endpoint.name, start.failure
        if failure:
            record_failure(self._record, failure, start.response)
        if call.exchange.status and not start.is_stream:
            detail = f"{name} answered {start.status} where the stream should have gone on"
            return StreamCut(self._endpoint, detail, refused=start.is_refusal)
        if call.exchange.status:
            await relay_rest(call, start, self._record, self._serving.settings.idle_timeout_s)
            return None
        if failure and ((again := self._may_retry(failure)) or failure is Failure.DIED):
            raise AttemptError(failure, f"{name} answered {start.status}", again)
        self._record.first_byte(start.status)
        record_first_byte(call, self._placement, start, self._serving)
        await relay(call, start, self._record, self._serving.settings.idle_timeout_s)
        return None

    def _connected(self, response: Response) -> None:
        self._call.exchange.response = response
        if self._call.exchange.abandoned or self._moved:
            response.cut()

    def _may_retry(self, failure: Failure) -> bool:
        return may_retry(self._call, self._placement.decision, failure, self._serving)

    def _failed(self, error: UpstreamError) -> AttemptError:
        """Records an error that came before the first byte, and converts it to an AttemptError."""
        failure = self._moved or failure_of(error)
        if failure in CAUSE:
            self._record.failed(CAUSE[failure])
        again = self._moved is not None or self._may_retry(failure)
        detail = f"moved away from it ({failure.value})" if self._moved else str(error)
        return AttemptError(failure, f"{self._endpoint.name}: {detail}", again)

    def _head_timeout_s(self, now_s: float) -> float:
        """Returns the time-out of the response head. The deadline limits it, except for a stream that is resumed."""
        head_timeout_s, left_s = self._serving.settings.head_timeout_s, max(0.0, self._call.retry_until_s - now_s)
        return head_timeout_s if self._call.exchange.status else min(head_timeout_s, left_s)
