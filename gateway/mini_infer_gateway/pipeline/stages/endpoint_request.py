"""Writes the request as one endpoint receives it, and the headers by which the client learns of the decision."""

from secrets import randbits

from mini_infer_contract.launch import (
    FETCH_FROM_HEADER,
    LEASE_HEADER,
    PREFILL_FROM_HEADER,
    QUEUED_MS_HEADER,
    RETURN_HEADER,
)
from mini_infer_gateway.flow_control.controller import Placement
from mini_infer_gateway.http.forms import with_model_field
from mini_infer_gateway.pipeline.call import Call
from mini_infer_gateway.pipeline.continuation.base import NO_CONTINUATION, Continuation
from mini_infer_gateway.pipeline.continuation.kinds import continuation_of
from mini_infer_gateway.pipeline.rewrite_model import with_model
from mini_infer_gateway.pipeline.serving import Serving
from mini_infer_gateway.prompts.tokenizers import TOKEN_IDS
from mini_infer_gateway.routing.base import Decision
from mini_infer_web.asgi import Headers

_PREFILL_FROM, _FETCH_FROM = PREFILL_FROM_HEADER.encode(), FETCH_FROM_HEADER.encode()
_QUEUED_MS, _LEASE, _RETURN = QUEUED_MS_HEADER.encode(), LEASE_HEADER.encode(), RETURN_HEADER.encode()


def write_request(call: Call, placement: Placement, serving: Serving) -> None:
    """Sets body, headers and continuation for the endpoint of `placement`."""
    decision, model = placement.decision, placement.decision.decode.model
    body = call.body if not call.body or call.fields.get("model") in (model, None) else _with_model(call, model)
    if not call.can_resume:
        call.continuation = _continuation(call, decision.decode.name, serving)
    call.exchange.body = call.continuation.body(body)
    call.exchange.hints = hints_of(decision)
    if call.row.generates:
        queued_s = max(0.0, serving.clock() - call.arrived_s)
        call.exchange.hints.append((_QUEUED_MS, b"%d" % (1000 * queued_s)))
    if call.expected.lease_s:
        call.exchange.hints.append((_LEASE, b"%.1f" % call.expected.lease_s))
    if call.expected.returns_s:
        call.exchange.hints.append((_RETURN, b"%.1f" % call.expected.returns_s))
    if serving.settings.routing_headers:
        call.exchange.decision_headers = _decision_headers(decision, placement.prompt_tokens)


def _with_model(call: Call, model: str) -> bytes:
    return with_model_field(call.body, call.boundary, model) if call.boundary else with_model(call.body, model)


def _continuation(call: Call, endpoint: str, serving: Serving) -> Continuation:
    """Returns the continuation of a stream that this endpoint begins."""
    subscriber = serving.fleet.endpoints[endpoint].subscriber
    form = call.row.continued if subscriber.resumes and serving.settings.continuation else None
    kind = continuation_of(form, call.fields) if form else None
    if kind is None:
        return NO_CONTINUATION
    continuation = kind.of(call.fields, randbits(63))
    continuation.reserve = call.reservation.add
    continuation.has_text = subscriber.assets_revision != TOKEN_IDS
    return continuation


def hints_of(decision: Decision) -> Headers:
    """Returns the headers that name other engines to an engine; they are never accepted from clients."""
    if decision.prefill:
        return [(_PREFILL_FROM, decision.prefill.transfer.encode())]
    return [(_FETCH_FROM, decision.fetch.transfer.encode())] if decision.fetch else []


def _decision_headers(decision: Decision, prompt_tokens: int) -> Headers:
    """Returns the headers by which the client learns of the decision."""
    has_slow_part = bool(decision.host_tokens or decision.disk_tokens)
    return [
        (b"x-mini-infer-pod", decision.decode.name.encode()),
        (b"x-mini-infer-hit-tokens", b"%d" % decision.hit_tokens),
        *([(b"x-mini-infer-hit-tiers", b"device=%d, host=%d, disk=%d" % decision.tiers)] if has_slow_part else []),
        (b"x-mini-infer-prompt-tokens", b"%d" % prompt_tokens),
        (b"x-mini-infer-reason", decision.reason.encode()),
        (b"x-mini-infer-index", decision.index.encode()),
        *([(b"x-mini-infer-prefill-pod", decision.prefill.name.encode())] if decision.prefill else []),
    ]
