"""Handles the requests that go on to an engine: reads, resolves the model, tokenises, routes, relays, and retries.

The stages of one request are in `Generate.__call__` and `Generate._serve`; a single attempt is in `attempt`.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from secrets import randbits
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from mini_infer_contract.launch import (
    CLIENT_HEADER,
    FETCH_FROM_HEADER,
    PREFILL_FROM_HEADER,
    QUEUE_TIMEOUT_HEADER,
    QUEUED_MS_HEADER,
    REQUEST_ID_HEADER,
    TARGET_HEADERS,
    Endpoint,
)
from mini_infer_gateway.fleet.backlog import Backlog
from mini_infer_gateway.fleet.load import LoadLedger
from mini_infer_gateway.fleet.prefill_rates import PrefillRates
from mini_infer_gateway.fleet.registry import Fleet, no_endpoint
from mini_infer_gateway.fleet.transfer_rates import TransferRates
from mini_infer_gateway.flow_control.controller import FlowController, Placement
from mini_infer_gateway.flow_control.flow_queue import IMMEDIATE
from mini_infer_gateway.http.asgi import ClientGoneError, client_gone, no_room, read_body, send_error
from mini_infer_gateway.http.forms import boundary_of, form_fields, with_model_field
from mini_infer_gateway.http.headers import to_endpoint
from mini_infer_gateway.http.keepalive import KeepAlive
from mini_infer_gateway.http.upstream import Upstream, UpstreamError
from mini_infer_gateway.index.prefix_index import PrefixIndex
from mini_infer_gateway.memory import BodyBudget, HeldBody
from mini_infer_gateway.metrics import Metrics, Outcome, outcome_of
from mini_infer_gateway.paths import EnginePath
from mini_infer_gateway.pipeline.attempt import AttemptError, Exchange, StreamCutError
from mini_infer_gateway.pipeline.clients import ANYBODY, Client, Clients, name_at_engines
from mini_infer_gateway.pipeline.continuation import Continuation
from mini_infer_gateway.pipeline.continuations import continuation_of
from mini_infer_gateway.pipeline.poison_requests import KILLS_LIMIT, PoisonRequests, endpoints_ended
from mini_infer_gateway.pipeline.retries import KILLS, Attempts, Failure, RetryBudget
from mini_infer_gateway.pipeline.rewrite_model import with_model
from mini_infer_gateway.pipeline.transfer_fields import refuse_transfer_fields
from mini_infer_gateway.prompts.tokenizers import TOKEN_IDS, Tokenizers
from mini_infer_gateway.routing.base import Decision, PromptKeys, RoutingRequest
from mini_infer_gateway.routing.router import Router
from mini_infer_gateway.settings import GatewaySettings
from mini_infer_web.api_errors import ApiError
from mini_infer_web.api_keys import ApiKeys
from mini_infer_web.asgi import Headers, Receive, Scope, Send
from mini_infer_web.http_server.client_link import CLIENT_LINK, ClientLink
from mini_infer_web.json_structure import check_structure
from mini_infer_web.request_timeout import request_timeout_s, timed_out

BYTES_PER_TOKEN = 4
"""Bytes per token, to estimate the tokens of a prompt that was not tokenised."""
FACTS = "mini_infer_facts"
"""Key in an ASGI scope: facts about the request for its log line, in addition to those of its head."""
CLIENT_CLOSED_REQUEST = 499
"""Status of nginx for a client that closed the connection, used in metrics only; nobody receives it."""

CONTINUATION_WAIT_S = 20.0
"""Seconds from the loss of a stream's endpoint in which another must continue the stream: an engine may have to start.
"""
CONTINUATION_PAUSE_S = 0.1
WARN_EVERY_S = 60.0
"""Seconds between two warnings that streams cannot be continued."""

_REQUEST_ID, _CLIENT = REQUEST_ID_HEADER.encode(), CLIENT_HEADER.encode()
_PREFILL_FROM, _FETCH_FROM = PREFILL_FROM_HEADER.encode(), FETCH_FROM_HEADER.encode()
_QUEUE_TIMEOUT, _QUEUED_MS = QUEUE_TIMEOUT_HEADER.encode(), QUEUED_MS_HEADER.encode()
_TARGET_HEADERS = frozenset(name.encode() for name in TARGET_HEADERS.values())
_TTFT = TARGET_HEADERS["ttft_ms"].encode()

INTERNAL_ERROR = ApiError(500, "an error of the gateway's own; its log says which", code="internal")

log = logging.getLogger(__name__)

_decoder = msgspec.json.Decoder()


@dataclass(slots=True)
class _Call:
    """A request in progress."""

    row: EnginePath
    path: str
    request_id: str
    arrived_s: float
    exchange: Exchange
    attempts: Attempts
    fields: dict[str, Any]
    model: str
    """The model as the client wrote it, which is a name in the catalog."""
    client_body: bytes
    held: HeldBody
    client_timeout_s: float
    """Seconds that the client allows the request to wait for an endpoint with room."""
    timeout_s: float
    """Seconds that the whole request may take; infinite if there is no limit."""
    facts: dict[str, Any]
    """Fields of the request's log line."""
    boundary: bytes = b""
    """The boundary between the parts of a form; empty if the body is JSON."""
    client: Client = ANYBODY

    def leave_queue_by(self, fail: Callable[[Exception], None]) -> None:
        """Ends the wait for an endpoint with `fail` if the client disconnects."""
        self.exchange.on_abandon = lambda: fail(ClientGoneError())

    def answer_begins(self, keep_body: bool) -> None:
        """Frees the body as the answer begins, unless another endpoint may have to continue the answer."""
        if keep_body and self.exchange.continuation:
            self.fields = {"model": self.model}
            return
        self.exchange.continuation = None
        self.client_body = self.exchange.body = b""
        self.fields = {}
        self.held.release()


class Generate:
    """Handles requests on the paths that engines answer."""

    def __init__(
        self,
        settings: GatewaySettings,
        fleet: Fleet,
        router: Router,
        tokenizers: Tokenizers,
        index: PrefixIndex,
        ledger: LoadLedger,
        backlog: Backlog,
        rates: PrefillRates,
        transfers: TransferRates,
        upstream: Upstream,
        metrics: Metrics,
        clock: Callable[[], float],
        bodies: BodyBudget,
        keys: ApiKeys | None = None,
    ) -> None:
        self._bodies = bodies
        self._clients = Clients(settings, keys or ApiKeys())
        self._settings, self._fleet, self._router, self._tokenizers = settings, fleet, router, tokenizers
        self._index, self._upstream = index, upstream
        self._metrics, self._clock = metrics, clock
        self.retry_budget = RetryBudget(refilled_s=clock())
        self._poison = PoisonRequests()
        self._warn_again_s = 0.0
        self.in_flight = 0
        """Number of requests that are being answered or wait for an answer."""
        self.flow = FlowController(
            settings, fleet, router, ledger, backlog, rates, transfers, metrics, self._guess, clock
        )

    async def __call__(self, row: EnginePath, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request, from its first byte to the metrics. `scope` contains its "request_id"."""
        arrived_s = self._clock()
        request_id: str = scope["request_id"]
        model, status, outcome = "", CLIENT_CLOSED_REQUEST, Outcome.INTERNAL
        exchange: Exchange | None = None
        facts: dict[str, Any] = scope.setdefault(FACTS, {})
        held = HeldBody(self._bodies)
        self.in_flight += 1
        try:
            boundary = boundary_of(scope["headers"]) if row.takes_forms else b""
            body = await read_body(scope, receive, self._settings.max_body_bytes, held.grow, bool(boundary))
            fields = form_fields(body, boundary) if boundary else await self._read_fields(scope, body, held)
            refuse_transfer_fields(fields)
            asked = asked_model(row, fields, self._fleet.catalog.listed)
            names = self._fleet.resolve(asked)
            model = asked
            client = self._clients.of(scope)
            facts |= client.facts
            body, fields = client.rewritten(row, body, fields) if body and not boundary else (body, fields)
            call = self._call(row, scope, arrived_s, fields, model, body, send, held)
            call.client = client
            call.exchange.headers.append((_CLIENT, name_at_engines(client, scope)))
            call.boundary = boundary
            del body, fields  # The call lets go of them with the answer's first byte.
            exchange = call.exchange
            await self._watched(call, names, scope.get(CLIENT_LINK), receive)
            status, outcome = exchange.status, _outcome(exchange)
        except ApiError as error:
            status, outcome, facts["error"] = error.status, outcome_of(error.status), error.message
            await _tell(exchange, send, error, request_id, row)
        except UpstreamError as error:
            status, outcome, facts["error"] = exchange.status if exchange else 0, Outcome.BROKE, str(error)
            log.warning("request %s of %s broke off: %s", request_id, model, error)
        except ClientGoneError:
            outcome = Outcome.CLIENT_GONE
            if exchange and (expired := exchange.expired):
                status, outcome, facts["error"] = expired.status, outcome_of(expired.status), expired.message
                await exchange.tell(expired)
        except Exception:
            status = 500
            log.exception("request %s of %s: an error of the gateway's own", request_id, model)
            if exchange and exchange.status:
                raise  # The connection is cut: the client must not take half an answer for a whole one.
            await _tell(exchange, send, INTERNAL_ERROR, request_id, row)
        finally:
            self.in_flight -= 1
            held.release()
            facts.update(model=model, status=status, outcome=outcome.value)
            self._metrics.answered(model, status, outcome, self._clock() - arrived_s)

    async def _read_fields(self, scope: Scope, body: bytes, held: HeldBody) -> dict[str, Any]:
        """Returns the fields of a JSON body, or of the query if the method is GET."""
        if not held.grow(len(body) + VALUE_BYTES * await check_structure(body)):
            raise no_room()
        return _in_query(scope) if scope["method"] == "GET" else _fields(body)

    def _call(
        self,
        row: EnginePath,
        scope: Scope,
        arrived_s: float,
        fields: dict[str, Any],
        model: str,
        body: bytes,
        send: Send,
        held: HeldBody,
    ) -> _Call:
        settings, request_id = self._settings, scope["request_id"]
        headers = to_endpoint(scope["headers"], settings.forward_authorization)
        forwarded = row.own_headers | _TARGET_HEADERS if row.generates else row.own_headers
        headers += [header for header in scope["headers"] if header[0] in forwarded]
        headers.append((_REQUEST_ID, request_id.encode()))
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        keepalive_s = settings.sse_keepalive_s if row.generates and fields.get("stream") is True else 0.0
        keepalive = KeepAlive(send, keepalive_s)
        exchange = Exchange(scope["method"], target, headers, body, send, keepalive, request_id, row.errors)
        self.retry_budget.earn(arrived_s)
        deadline_s = arrived_s + settings.request_deadline_s
        kills = self._poison.kills(scope["path"], body, arrived_s)
        attempts = Attempts(self.retry_budget, settings.max_attempts, deadline_s, kills=kills)
        client_timeout_s = min(_client_timeout_s(scope["headers"]), _first_token_target_s(scope["headers"], fields))
        timeout_s = request_timeout_s(scope["headers"], settings.request_timeout_s) if row.generates else inf
        facts = scope[FACTS]
        return _Call(
            row,
            scope["path"],
            request_id,
            arrived_s,
            exchange,
            attempts,
            fields,
            model,
            body,
            held,
            client_timeout_s,
            timeout_s,
            facts,
        )

    async def _watched(self, call: _Call, names: Sequence[str], link: ClientLink | None, receive: Receive) -> None:
        """Serves the call as long as its client is connected."""
        exchange = call.exchange
        unwatch = _watch_link(link, exchange) if link else _watch_messages(receive, exchange)
        exchange.keepalive.start()
        timer = self._time_limit(call)
        try:
            await self._serve(call, names)
        finally:
            if timer:
                timer.cancel()
            exchange.keepalive.stop()
            unwatch()
            exchange.let_go()

    def _time_limit(self, call: _Call) -> asyncio.TimerHandle | None:
        if call.timeout_s == inf:
            return None
        left_s = max(0.0, call.arrived_s + call.timeout_s - self._clock())
        return asyncio.get_running_loop().call_later(left_s, call.exchange.expire, timed_out(call.timeout_s))

    async def _serve(self, call: _Call, names: Sequence[str]) -> None:
        if call.attempts.kills >= KILLS_LIMIT:
            self._metrics.poison_refused()
            raise endpoints_ended(call.model, call.attempts.kills)
        request = await self._routing_request(call, names)
        while True:
            placement = await self._place(call, request, names)
            try:
                if placement.decision.decode.name not in self._fleet.endpoints:
                    continue  # It went in the moment between.
                call.attempts.count += 1
                call.exchange.retry = partial(self._may_retry, call, request, placement.decision, names)
                try:
                    await self._attempt(call, request, placement)
                    return
                except AttemptError as failed:
                    log.info("request %s: %s", call.request_id, failed)
                    if not failed.again:
                        raise _given_up(call, failed) from failed
                    self._metrics.retried(failed.failure.value)
                    request = _elsewhere(request, placement.decision)
                    continue
                except StreamCutError as error:
                    lost, cut = placement.decision.decode, error
            finally:
                self.flow.finish(placement)
            await self._continue(call, request, lost, names, cut)
            return

    async def _continue(
        self, call: _Call, request: RoutingRequest, lost: Endpoint, names: Sequence[str], cut: StreamCutError
    ) -> None:
        """Continues a stream on other endpoints of the same revision, or on the same endpoint when it is back."""
        continuation = call.exchange.continuation
        assert continuation is not None
        give_up_s, told, idle = self._clock() + CONTINUATION_WAIT_S, continuation.progress, 0
        while not continuation.done and idle < KILLS_LIMIT and self._clock() < give_up_s:
            decision = self._route_again(request, lost, names)
            if decision is None:
                await asyncio.sleep(CONTINUATION_PAUSE_S)
                if call.exchange.gone:
                    raise ClientGoneError
                continue
            log.info("request %s goes on at %s: %s", call.request_id, decision.decode.name, cut)
            try:
                placement = self.flow.place_now(request, decision, call.request_id)
                try:
                    await self._attempt(call, request, placement)
                finally:
                    self.flow.finish(placement)
                self._metrics.continued(True)
                return
            except StreamCutError as again:
                cut = again
            if continuation.progress > told:
                give_up_s, told, idle = self._clock() + CONTINUATION_WAIT_S, continuation.progress, 0
            else:
                idle += KILLS_LIMIT if cut.refused else cut.died
            lost = decision.decode
            await asyncio.sleep(CONTINUATION_PAUSE_S)
        await self._end_stream(call, continuation, cut)

    def _route_again(self, request: RoutingRequest, lost: Endpoint, names: Sequence[str]) -> Decision | None:
        now_s = self._clock()
        candidates = [one for one in self._fleet.candidates(names, now_s) if one.endpoint.revision == lost.revision]
        candidates = [one for one in candidates if one.resumes and not one.circuit_open]
        elsewhere = replace(request, attempted=frozenset({lost.name}))
        return self._router.route(elsewhere, candidates, now_s) or self._router.route(
            replace(request, attempted=frozenset()), candidates, now_s
        )

    async def _end_stream(self, call: _Call, continuation: Continuation, cut: StreamCutError) -> None:
        """Ends a stream that no endpoint continues: with its last event if only that is missing, else with an error."""
        if continuation.finished and not continuation.wants_usage:
            rest = b"" if continuation.done else continuation.end
            await call.exchange.send({"type": "http.response.body", "body": rest})
            return
        self._metrics.continued(False)
        await call.exchange.tell_broken(str(cut))
        raise UpstreamError(str(cut)) from cut

    async def _place(self, call: _Call, request: RoutingRequest, names: Sequence[str]) -> Placement:
        """Waits for an endpoint with room. Raises ApiError if none exists or too many wait; ClientGoneError."""
        if call.exchange.gone:
            raise ClientGoneError

        placement = await self.flow.place(
            request,
            partial(self._names_now, call.model, names),
            call.request_id,
            call.leave_queue_by,
            call.arrived_s + call.client_timeout_s,
        )
        if placement is None:
            raise no_endpoint(call.model)
        if call.exchange.gone:
            self.flow.finish(placement)
            raise ClientGoneError
        return placement

    def _names_now(self, model: str, names: Sequence[str]) -> Sequence[str]:
        return self._fleet.catalog.by_name.get(model, names)

    def _may_retry(
        self, call: _Call, request: RoutingRequest, decision: Decision, names: Sequence[str], failure: Failure
    ) -> bool:
        """Returns True if the request is to be retried after this failure; looks up the remaining endpoints late."""
        now_s, others = self._clock(), _elsewhere(request, decision)
        if failure in KILLS:
            self._poison.killed(call.path, call.client_body, decision.decode.name, now_s)

        def others_left(failure: Failure) -> bool:
            left = self._router.eligible(others, self._fleet.candidates(names, now_s))
            if failure in (Failure.OVERLOADED, Failure.UNATTAINABLE):
                # A client that can be told to come back later is not sent to an endpoint that is known to be broken.
                return any(not candidate.circuit_open for candidate in left)
            return bool(left)

        return call.attempts.retry(failure, others_left, now_s)

    async def _routing_request(self, call: _Call, names: Sequence[str]) -> RoutingRequest:
        began_s = self._clock()
        prompts = (
            await self._tokenizers.keys(
                call.row.prompts,
                call.fields,
                len(call.client_body),
                self._fleet.assets_revisions(names),
                self._fleet.max_prompt_tokens(names),
                abandoned=lambda: call.exchange.gone,
            )
            if call.row.prompts
            else {}
        )
        call.held.settle(len(call.client_body))
        if prompts:
            self._metrics.tokenized(self._clock() - began_s)
        unknown = 0 if call.boundary else len(call.client_body) // BYTES_PER_TOKEN
        tokens = max((prompt.tokens for prompt in prompts.values()), default=unknown)
        # What takes no part in a batch takes no place in the queue either: it goes before all that wait.
        priority = call.client.priority(call.fields) if call.row.generates else IMMEDIATE
        order_timeout_s = call.client_timeout_s if call.client.orders_by_deadline else inf
        return RoutingRequest(
            call.model,
            tokens,
            prompts,
            may_split=call.row.continued is not None and _has_one_prompt(prompts),
            order=self.flow.order(priority, call.arrived_s, order_timeout_s),
            flow=call.client.flow,
        )

    async def _attempt(self, call: _Call, request: RoutingRequest, placement: Placement) -> None:
        """Sends the request to one endpoint, whose load includes it already."""
        decision, now_s = placement.decision, self._clock()
        endpoint = decision.decode
        self._metrics.decided(decision.reason)
        if not request.attempted:
            self._metrics.overhead(now_s - call.arrived_s - placement.waited_s)
        call.exchange.body = (
            call.client_body
            if call.fields.get("model") in (endpoint.model, None) or not call.client_body
            else _with_model(call, endpoint.model)
        )
        is_continued = self._ask_for_ids(call, endpoint)
        call.exchange.hints = _hints(decision)
        if call.row.generates:
            call.exchange.hints.append((_QUEUED_MS, b"%d" % max(0.0, 1000 * (now_s - call.arrived_s))))
        is_stream = call.fields.get("stream") is True

        def first_byte(status: int) -> None:
            fallback = call.exchange.kv_fallback
            self.flow.first_byte(placement, is_stream, came_apart=not fallback)
            if status < 500:
                self._poison.answered(call.path, call.client_body)
            self._begin_answer(call)
            call.facts.update(endpoint=endpoint.name, prompt_tokens=placement.prompt_tokens)
            if decision.prefill:
                call.facts["prefill_endpoint"] = decision.prefill.name
                if status < 300:
                    self._fleet.computed_for_another(decision.prefill.name, fallback)
            if fallback:
                call.facts["kv_fallback"] = fallback
            if status < 300 and not is_continued:
                took_s = self._clock() - call.arrived_s
                if is_stream:
                    call.facts["first_token_s"] = round(took_s, 6)
                self._metrics.first_byte(call.model, took_s, placement.prompt_tokens, decision.hit_tokens)

        record = self._fleet.begin(endpoint.name, call.exchange)
        outcome = Outcome.INTERNAL
        try:
            await call.exchange.attempt(
                self._upstream,
                endpoint,
                self._answer_headers(decision, placement.prompt_tokens),
                self._settings,
                self._head_timeout_s(call, now_s),
                record,
                first_byte,
            )
            outcome = _outcome(call.exchange)
        except AttemptError as failed:
            outcome = Outcome.RETRIED if failed.again else Outcome.BROKE
            raise
        except StreamCutError:
            outcome = Outcome.CONTINUED
            raise
        except UpstreamError:
            outcome = Outcome.BROKE
            raise
        except (ClientGoneError, asyncio.CancelledError):
            outcome = Outcome.CLIENT_GONE
            raise
        finally:
            if endpoint.name in self._fleet.endpoints:
                self._metrics.attempted(endpoint.name, outcome)
            record.close()

    def _begin_answer(self, call: _Call) -> None:
        """Retains the body for a continuation if there is memory for it; otherwise counts the stream and warns."""
        is_tight = self._bodies.is_tight
        if is_tight and call.exchange.continuation:
            self._metrics.continuation_off()
            if self._clock() >= self._warn_again_s:
                self._warn_again_s = self._clock() + WARN_EVERY_S
                log.warning(
                    "streams that begin now are not continued should their endpoint die: bodies take more than half of "
                    "their share of --memory-limit; raise it"
                )
        call.answer_begins(keep_body=not is_tight)

    def _head_timeout_s(self, call: _Call, now_s: float) -> float:
        """Returns the time-out of the response head. The deadline limits it, except for a stream that continues."""
        left_s = max(0.0, call.attempts.deadline_s - now_s)
        return self._settings.head_timeout_s if call.exchange.status else min(self._settings.head_timeout_s, left_s)

    def _ask_for_ids(self, call: _Call, endpoint: Endpoint) -> bool:
        """Prepares a stream for continuation if possible. Returns True if this attempt continues a stream."""
        exchange = call.exchange
        if exchange.can_resume and exchange.continuation:
            exchange.body = exchange.continuation.body(exchange.body)
            return True
        subscriber = self._fleet.endpoints[endpoint.name].subscriber
        form = call.row.continued if subscriber.resumes and self._settings.continuation else None
        if form and (kind := continuation_of(form, call.fields)):
            exchange.continuation = kind.of(call.fields, randbits(63))
            exchange.continuation.has_text = subscriber.assets_revision != TOKEN_IDS
            exchange.body = exchange.continuation.body(exchange.body)
        else:
            exchange.continuation = None
        return False

    def _answer_headers(self, decision: Decision, prompt_tokens: int) -> Headers:
        return _decision_headers(decision, prompt_tokens) if self._settings.routing_headers else []

    def _guess(self, request: RoutingRequest, decision: Decision, now_s: float) -> int:
        """Counts the prompt as cached at the endpoint from now on, and returns its number of tokens."""
        name = decision.decode.name
        prompt = request.prompts.get(self._fleet.endpoints[name].subscriber.assets_revision)
        if prompt is None:
            return 0
        ttl_s = self._settings.guess_ttl_s if decision.index == "exact" else self._settings.approximate_ttl_s
        for chain in prompt.chains:
            for endpoint in decision.endpoints:
                self._index.guess(endpoint.name, chain, now_s + ttl_s)
        return prompt.tokens


VALUE_BYTES = 12
"""Bytes counted for a value of a body beyond its length: decoded, it takes several times as much memory."""


def asked_model(row: EnginePath, fields: dict[str, Any], listed: Sequence[str]) -> str:
    """Returns the model that a body names. Raises ApiError 400 if it names none."""
    model = fields.get("model")
    if model is None and row.any_model and not listed:
        raise no_endpoint("any")
    if model is None and (row.any_model or (row.lone_model and len(listed) == 1)):
        return listed[0]
    if not isinstance(model, str) or not model:
        known = ", ".join(listed) or "none yet"
        raise ApiError(
            400, f"model must name the model to use; models here: {known}", param="model", code="invalid_value"
        )
    return model


def _with_model(call: _Call, model: str) -> bytes:
    if call.boundary:
        return with_model_field(call.client_body, call.boundary, model)
    return with_model(call.client_body, model)


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the request body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, 'the request body must be a JSON object such as {"model": ...}', code="invalid_json")
    return fields


def _watch_link(link: ClientLink, exchange: Exchange) -> Callable[[], None]:
    """Abandons the exchange when its client's connection is lost. Returns a function that stops watching."""
    link.watch(exchange.abandon)
    return link.unwatch


def _watch_messages(receive: Receive, exchange: Exchange) -> Callable[[], None]:
    """Abandons the exchange when its client disconnects, by a task that waits for the ASGI message."""

    def leave(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            exchange.abandon()

    watch = asyncio.create_task(client_gone(receive))
    watch.add_done_callback(leave)

    def unwatch() -> None:
        watch.remove_done_callback(leave)
        watch.cancel()

    return unwatch


async def _tell(exchange: Exchange | None, send: Send, error: ApiError, request_id: str, row: EnginePath) -> None:
    if exchange:
        await exchange.tell(error)
    else:
        await send_error(send, error, request_id, row.errors)


def _outcome(exchange: Exchange) -> Outcome:
    """Returns the outcome of an exchange that was relayed to its end."""
    return Outcome.IN_BAND_ERROR if exchange.in_band_error else outcome_of(exchange.status)


def _in_query(scope: Scope) -> dict[str, Any]:
    """Returns the fields of a request without a body: the last value of each query parameter."""
    return dict(parse_qsl(scope["query_string"].decode("latin-1")))


def _client_timeout_s(headers: Headers) -> float:
    """Returns the seconds that the client allows in the queue; infinite if it sent none or no number."""
    sent = next((value for name, value in headers if name == _QUEUE_TIMEOUT), b"")
    try:
        client_timeout_s = float(sent)
    except ValueError:
        return inf
    return max(0.0, client_timeout_s) if client_timeout_s == client_timeout_s else inf


def _first_token_target_s(headers: Headers, fields: Mapping[str, Any]) -> float:
    """Returns the seconds in which the client expects a first token; infinite if it states none, or no number.

    Later the request is of no use to it, so it need not wait longer, and its turn comes by that time. The engine checks
    the values.
    """
    sent = fields.get("ttft_ms", next((value for name, value in headers if name == _TTFT), None))
    try:
        target_s = float(sent) / 1000 if isinstance(sent, int | float | bytes) else inf
    except (ValueError, OverflowError):
        return inf
    return target_s if target_s > 0 else inf


def _elsewhere(request: RoutingRequest, decision: Decision) -> RoutingRequest:
    """Returns the request with the endpoints excluded that may have caused a failure."""
    return replace(request, attempted=request.attempted.union(endpoint.name for endpoint in decision.endpoints))


def _has_one_prompt(prompts: Mapping[str, PromptKeys]) -> bool:
    return bool(prompts) and all(len(prompt.chains) == 1 for prompt in prompts.values())


def _hints(decision: Decision) -> Headers:
    """Returns the headers that name other engines to an engine; they are never accepted from clients."""
    if decision.prefill:
        return [(_PREFILL_FROM, decision.prefill.transfer.encode())]
    return [(_FETCH_FROM, decision.fetch.transfer.encode())] if decision.fetch else []


def _decision_headers(decision: Decision, prompt_tokens: int) -> Headers:
    return [
        (b"x-mini-infer-pod", decision.decode.name.encode()),
        (b"x-mini-infer-hit-tokens", b"%d" % decision.hit_tokens),
        (b"x-mini-infer-prompt-tokens", b"%d" % prompt_tokens),
        (b"x-mini-infer-reason", decision.reason.encode()),
        (b"x-mini-infer-index", decision.index.encode()),
        *([(b"x-mini-infer-prefill-pod", decision.prefill.name.encode())] if decision.prefill else []),
    ]


def _given_up(call: _Call, failed: AttemptError) -> ApiError:
    """Returns the error for a request whose last attempt failed before its first byte."""
    if failed.failure is Failure.TIMEOUT:
        message = f"an endpoint of model {call.model!r} did not answer in time: {failed}"
        return ApiError(504, message, code="endpoint_timeout")
    if failed.failure is Failure.MALFORMED:
        message = f"an endpoint of model {call.model!r} answered with something that is no answer: {failed}"
        return ApiError(502, message, code="endpoint_malformed")
    if call.attempts.kills >= KILLS_LIMIT:
        return endpoints_ended(call.model, call.attempts.kills, str(failed))
    if failed.failure is Failure.DIED:
        message = f"the engine of an endpoint of model {call.model!r} has ended ({failed}); try again shortly"
        return ApiError(503, message, code="engine_dead", headers={"retry-after": "1"})
    return no_endpoint(call.model, str(failed))
