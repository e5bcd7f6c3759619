"""Resolves a request: its model, its client, its limits, and the bytes that are the same for every endpoint."""

from collections.abc import Sequence
from math import inf
from typing import Any

from mini_infer_contract.launch import CLIENT_HEADER, REQUEST_ID_HEADER, TARGET_HEADERS
from mini_infer_gateway.fleet.registry import no_endpoint
from mini_infer_gateway.flow_control.flow_queue import IMMEDIATE
from mini_infer_gateway.http.headers import first_token_target_s, queue_timeout_s, to_endpoint
from mini_infer_gateway.paths import EnginePath
from mini_infer_gateway.pipeline.call import Call
from mini_infer_gateway.pipeline.errors import endpoints_ended
from mini_infer_gateway.pipeline.pinned_engine import pinned
from mini_infer_gateway.pipeline.poison_requests import KILLS_LIMIT
from mini_infer_gateway.pipeline.serving import Serving
from mini_infer_web.api_errors import ApiError, known_models
from mini_infer_web.request_timeout import request_timeout_s

_REQUEST_ID, _CLIENT = REQUEST_ID_HEADER.encode(), CLIENT_HEADER.encode()
_TARGET_HEADERS = frozenset(name.encode() for name in TARGET_HEADERS.values())


def resolve(call: Call, serving: Serving) -> None:
    """Finds the model's endpoints, the client and the limits.

    Raises ApiError: 400 if the body names no model, 404 or 503 if none serves it, 502 if the request ended engines.
    """
    row, scope, exchange, settings = call.row, call.scope, call.exchange, serving.settings
    model = requested_model(row, call.fields, serving.fleet.catalog.listed)
    endpoints = serving.fleet.resolve(model)
    call.model = model
    call.placed_as, call.endpoints = pinned(scope, model, endpoints, serving.may_pin)

    call.client = client = serving.clients.of(scope)
    call.log_fields |= client.log_fields
    if call.body and not call.boundary:
        call.body, call.fields = client.rewritten(row, call.body, call.fields)
    # What takes no part in a batch takes no place in the queue either: it goes before all that wait.
    call.priority = client.priority(call.fields) if row.generates else IMMEDIATE
    own_headers = [(_REQUEST_ID, call.request_id.encode()), (_CLIENT, client.name_for_engines(scope))]

    exchange.method = scope["method"]
    exchange.target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    exchange.headers = to_endpoint(scope["headers"], settings.forward_authorization)
    forwarded = row.own_headers | _TARGET_HEADERS if row.generates else row.own_headers
    exchange.headers += [header for header in scope["headers"] if header[0] in forwarded]
    exchange.headers += own_headers

    call.queue_timeout_s = queue_timeout_s(scope["headers"])
    call.first_token_target_s = first_token_target_s(scope["headers"], call.fields)
    call.timeout_s = request_timeout_s(scope["headers"], settings.request_timeout_s) if row.generates else inf
    call.retry_until_s = call.arrived_s + settings.request_deadline_s
    serving.retry_budget.earn(call.arrived_s)
    call.kills = serving.poison.kills(scope["path"], call.body, call.arrived_s)
    if call.kills >= KILLS_LIMIT:
        serving.metrics.poison_refused()
        raise endpoints_ended(model, call.kills)


def requested_model(row: EnginePath, fields: dict[str, Any], listed: Sequence[str]) -> str:
    """Returns the model that a body names. Raises ApiError 400 if it names none."""
    model = fields.get("model")
    if model is None and row.any_model and not listed:
        raise no_endpoint("any")
    if model is None and (row.any_model or (row.lone_model and len(listed) == 1)):
        return listed[0]
    if not isinstance(model, str) or not model:
        known = known_models(listed)
        raise ApiError(
            400, f"model must name the model to use; models here: {known}", param="model", code="invalid_value"
        )
    return model
