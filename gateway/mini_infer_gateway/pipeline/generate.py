"""The requests that go on to an engine: read, resolve the model, tokenise, route, relay, and try again elsewhere.

Stages of one request stand in `Generate.__call__` and `Generate._serve`; what one attempt does is in attempt.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import msgspec

from mini_infer_contract.api_errors import ApiError
from mini_infer_contract.launch import REQUEST_ID_HEADER
from mini_infer_gateway.fleet.load import LoadLedger
from mini_infer_gateway.fleet.registry import Fleet, no_endpoint
from mini_infer_gateway.http.asgi import (
    ClientGoneError,
    Headers,
    Receive,
    Scope,
    Send,
    client_gone,
    read_body,
    send_error,
)
from mini_infer_gateway.http.upstream import Upstream, UpstreamError
from mini_infer_gateway.index.prefix_index import PrefixIndex
from mini_infer_gateway.metrics import Metrics
from mini_infer_gateway.pipeline.attempt import AttemptError, Exchange, Failure
from mini_infer_gateway.pipeline.rewrite_model import with_model
from mini_infer_gateway.routing.base import Decision, RoutingRequest
from mini_infer_gateway.routing.router import Router
from mini_infer_gateway.settings import GatewaySettings
from mini_infer_gateway.tokenizers import Tokenizers

TEXT_PATHS = frozenset(("/tokenize", "/detokenize"))
"""Here the model may be left out while there is only one."""
BYTES_PER_TOKEN = 4
"""To weigh a prompt that was not tokenised."""
CLIENT_CLOSED_REQUEST = 499
"""nginx' status for metrics; nobody receives it."""

_REQUEST_ID = REQUEST_ID_HEADER.encode()

log = logging.getLogger(__name__)

_decoder = msgspec.json.Decoder()


@dataclass(slots=True)
class _Call:
    """One request on its way."""

    path: str
    request_id: str
    arrived_s: float
    exchange: Exchange
    fields: dict[str, Any]
    model: str
    """As the client wrote it: a name of the catalog."""
    client_body: bytes


class Generate:
    """Handles POST on the paths that engines answer."""

    def __init__(
        self,
        settings: GatewaySettings,
        fleet: Fleet,
        router: Router,
        tokenizers: Tokenizers,
        index: PrefixIndex,
        ledger: LoadLedger,
        upstream: Upstream,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._settings, self._fleet, self._router, self._tokenizers = settings, fleet, router, tokenizers
        self._index, self._ledger, self._upstream = index, ledger, upstream
        self._metrics, self._clock = metrics, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, from its first byte to the metrics."""
        arrived_s = self._clock()
        request_id = next((value for name, value in scope["headers"] if name == _REQUEST_ID), b"")
        headers: Headers = scope["headers"]
        if not request_id:
            request_id = uuid4().hex.encode()
            headers = [*headers, (_REQUEST_ID, request_id)]
        model, status = "", CLIENT_CLOSED_REQUEST
        exchange: Exchange | None = None
        try:
            body = await read_body(scope, receive, self._settings.max_body_bytes)
            fields = _fields(body)
            asked = self._model(scope["path"], fields)
            names = self._fleet.resolve(asked)
            model = asked
            target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
            exchange = Exchange(scope["method"], target, headers, body, send)
            call = _Call(scope["path"], request_id.decode("latin-1"), arrived_s, exchange, fields, model, body)
            await self._watched(call, names, receive)
            status = exchange.status
        except ApiError as error:
            status = error.status
            await send_error(send, error, [(_REQUEST_ID, request_id)])
        except UpstreamError as error:
            status = exchange.status if exchange else 0
            log.warning("request %s of %s broke off: %s", request_id.decode("latin-1"), model, error)
        except ClientGoneError:
            pass
        finally:
            self._metrics.answered(model, status)

    def _model(self, path: str, fields: dict[str, Any]) -> str:
        model = fields.get("model")
        listed = self._fleet.catalog.listed
        if model is None and path in TEXT_PATHS and len(listed) == 1:
            return listed[0]
        if not isinstance(model, str) or not model:
            known = ", ".join(listed) or "none yet"
            raise ApiError(400, f"model must name the model to use; models here: {known}", param="model")
        return model

    async def _watched(self, call: _Call, names: Sequence[str], receive: Receive) -> None:
        """Serves the call as long as its client is there."""
        serving = asyncio.current_task()
        assert serving is not None
        watch = asyncio.create_task(client_gone(receive))

        def leave(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                call.exchange.abandon()

        watch.add_done_callback(leave)
        try:
            await self._serve(call, names)
        finally:
            watch.remove_done_callback(leave)
            watch.cancel()

    async def _serve(self, call: _Call, names: Sequence[str]) -> None:
        request = await self._routing_request(call, names)
        while True:
            now_s = self._clock()
            candidates = self._fleet.candidates(names, now_s)
            decision = self._router.route(request, candidates, now_s)
            if call.exchange.gone:
                raise ClientGoneError
            if decision is None:
                raise no_endpoint(call.model)
            attempted = request.attempted | {decision.decode.name}
            others = self._router.eligible(replace(request, attempted=attempted), candidates)
            last = not others or len(attempted) >= self._settings.max_attempts
            try:
                await self._attempt(call, request, decision, last, now_s)
                return
            except AttemptError as failed:
                self._judge(decision.decode.name, failed.failure)
                log.info("request %s: %s", call.request_id, failed)
                if last:
                    raise _given_up(call.model, failed) from failed
                self._metrics.retried(failed.failure.value)
                request = replace(request, attempted=attempted)

    async def _routing_request(self, call: _Call, names: Sequence[str]) -> RoutingRequest:
        revisions = {candidate.assets_revision for candidate in self._fleet.candidates(names, call.arrived_s)}
        prompts = await self._tokenizers.keys(call.path, call.fields, len(call.client_body), revisions)
        tokens = max((prompt.tokens for prompt in prompts.values()), default=len(call.client_body) // BYTES_PER_TOKEN)
        return RoutingRequest(call.model, tokens, prompts)

    async def _attempt(
        self, call: _Call, request: RoutingRequest, decision: Decision, last: bool, now_s: float
    ) -> None:
        """One endpoint: counted as load and guessed as cached before it can say so itself."""
        endpoint = decision.decode
        state = self._fleet.endpoints[endpoint.name]
        prompt = request.prompts.get(state.subscriber.assets_revision)
        if prompt:
            exact = decision.index == "exact"
            ttl_s = self._settings.guess_ttl_s if exact else self._settings.approximate_ttl_s
            for chain in prompt.chains:
                self._index.guess(endpoint.name, chain, now_s + ttl_s)
        prompt_tokens = prompt.tokens if prompt else 0
        flight = self._ledger.start(endpoint.name, call.request_id, max(0, request.prompt_tokens - decision.hit_tokens))
        self._metrics.decided(decision.reason)
        if not request.attempted:
            self._metrics.overhead(self._clock() - call.arrived_s)
        call.exchange.body = (
            call.client_body
            if call.fields.get("model") in (endpoint.model, None)
            else with_model(call.client_body, endpoint.model)
        )

        def first_byte() -> None:
            flight.answered = True
            self._metrics.first_byte(call.model, self._clock() - call.arrived_s, prompt_tokens, decision.hit_tokens)

        state.breaker.started()
        try:
            await call.exchange.attempt(
                self._upstream,
                endpoint,
                _decision_headers(call, decision, prompt_tokens),
                self._settings,
                last,
                first_byte,
            )
        except UpstreamError:
            self._fleet.say_failed(endpoint.name)
            raise
        except AttemptError:
            raise
        except BaseException:
            state.breaker.ended()
            raise
        else:
            if call.exchange.status >= 500:
                self._fleet.say_failed(endpoint.name)
            else:
                self._fleet.say_succeeded(endpoint.name)
        finally:
            self._ledger.finish(flight)

    def _judge(self, name: str, failure: Failure) -> None:
        if failure is Failure.DRAINING:
            self._fleet.say_draining(name)
        else:
            self._fleet.say_failed(name, unreachable=failure in (Failure.CONNECT, Failure.BROKE))


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the request body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, 'the request body must be a JSON object such as {"model": ...}', code="invalid_json")
    return fields


def _decision_headers(call: _Call, decision: Decision, prompt_tokens: int) -> Headers:
    return [
        (_REQUEST_ID, call.request_id.encode("latin-1")),
        (b"x-mini-infer-pod", decision.decode.name.encode()),
        (b"x-mini-infer-hit-tokens", b"%d" % decision.hit_tokens),
        (b"x-mini-infer-prompt-tokens", b"%d" % prompt_tokens),
        (b"x-mini-infer-reason", decision.reason.encode()),
        (b"x-mini-infer-index", decision.index.encode()),
    ]


def _given_up(model: str, failed: AttemptError) -> ApiError:
    if failed.failure is Failure.TIMEOUT:
        return ApiError(
            504, f"an endpoint of model {model!r} did not answer in time: {failed}", code="endpoint_timeout"
        )
    return no_endpoint(model, str(failed))
