"""Reads a request: its body, and the fields of the JSON object, the form or the query that it is."""

from typing import Any
from urllib.parse import parse_qsl

import msgspec

from mini_infer_gateway.http.asgi import body_memory_error, read_body
from mini_infer_gateway.http.forms import boundary_of, form_fields
from mini_infer_gateway.pipeline.call import Call
from mini_infer_gateway.pipeline.serving import Serving
from mini_infer_gateway.pipeline.transfer_fields import refuse_transfer_fields
from mini_infer_web.api_errors import ApiError, json_fault
from mini_infer_web.json_structure import check_structure

_decoder = msgspec.json.Decoder()


async def read(call: Call, serving: Serving) -> None:
    """Reads the body and its fields.

    Raises ApiError: 400 if they are malformed or contain a field that no client may set, 413 or 415 if the body is
    none that is accepted, 503 if there is no memory for it. Raises ClientDisconnectedError.
    """
    scope = call.scope
    call.boundary = boundary_of(scope["headers"]) if call.row.accepts_forms else b""
    call.body = body = await read_body(
        scope, call.receive, serving.settings.max_body_bytes, call.reservation.grow, bool(call.boundary)
    )
    if call.boundary:
        call.fields = form_fields(body, call.boundary)
    elif not call.reservation.grow(len(body), await check_structure(body)):
        raise body_memory_error()
    elif scope["method"] == "GET":
        call.fields = dict(parse_qsl(scope["query_string"].decode("latin-1")))
    else:
        call.fields = _json_object(body)
    refuse_transfer_fields(call.fields)


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        fields = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the request body is no JSON: {json_fault(body, error)}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, 'the request body must be a JSON object such as {"model": ...}', code="invalid_json")
    return fields
