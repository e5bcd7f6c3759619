"""Filters the headers that are forwarded in either direction. Pure; names are in lower case, as in ASGI."""

from collections.abc import Mapping
from math import inf
from typing import Any

from mini_infer_apis.dialects.anthropic_errors import ID_HEADER
from mini_infer_contract.launch import QUEUE_TIMEOUT_HEADER, REQUEST_ID_HEADER, TARGET_HEADERS

Headers = list[tuple[bytes, bytes]]

PRIVATE_PREFIX = b"x-mini-infer-"
"""Prefix of the headers between gateway and engines: they are neither accepted from clients nor sent to them."""
_PREFIX_BYTES = len(PRIVATE_PREFIX)

_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_REQUEST_OWN = frozenset(
    (b"host", b"origin", b"content-length", b"content-encoding", b"expect", REQUEST_ID_HEADER.encode())
)
"""Headers that are rewritten for the connection to the endpoint, which receives decompressed bodies. A page's origin is
checked here, against the gateway's own host: an engine would take the gateway's page for one from elsewhere.
"""
_CREDENTIALS = frozenset((b"authorization", b"x-api-key", b"cookie"))
"""Credentials of a client for the gateway; they are not meant for every pod that a namespace may start."""
_RESPONSE_PRIVATE = frozenset((b"set-cookie", b"location", b"server", REQUEST_ID_HEADER.encode(), ID_HEADER.encode()))
"""Headers that are not sent to clients: an endpoint's address and cookies have no meaning outside, and the gateway sets
the request's id itself.
"""


_NOT_TO_ENDPOINT = {
    False: _HOP_BY_HOP | _REQUEST_OWN | _CREDENTIALS,
    True: _HOP_BY_HOP | _REQUEST_OWN | {b"cookie"},
}
"""Headers that are not forwarded to an endpoint, by whether it receives clients' credentials."""
_QUEUE_TIMEOUT, _TTFT = QUEUE_TIMEOUT_HEADER.encode(), TARGET_HEADERS["ttft_ms"].encode()
_NOT_TO_CLIENT = _HOP_BY_HOP | _RESPONSE_PRIVATE


def to_endpoint(headers: Headers, forward_authorization: bool = False) -> Headers:
    """Returns a client's headers in the form in which an endpoint receives them."""
    return _without(headers, _NOT_TO_ENDPOINT[forward_authorization])


def to_client(headers: Headers, own: Headers) -> Headers:
    """Returns an endpoint's headers for the client; `own` replace those of the same name."""
    return _without(headers, _NOT_TO_CLIENT.union(name for name, _ in own) if own else _NOT_TO_CLIENT) + own


def _without(headers: Headers, unwanted: frozenset[bytes]) -> Headers:
    for name, value in headers:
        if name == b"connection":
            unwanted |= {word.strip().lower() for word in value.split(b",")}
    # Of names, dropped are those that a server may read as private ones, as CGI's kind does; of values, several lines.
    return [
        (name, value)
        for name, value in headers
        if name not in unwanted
        and (name if b"_" not in name else name.replace(b"_", b"-"))[:_PREFIX_BYTES] != PRIVATE_PREFIX
        and b"\n" not in value
        and b"\r" not in value
    ]


def queue_timeout_s(headers: Headers) -> float:
    """Returns the seconds that a client allows in the queue; infinite if it sent none or no number."""
    sent = next((value for name, value in headers if name == _QUEUE_TIMEOUT), b"")
    try:
        timeout_s = float(sent)
    except ValueError:
        return inf
    return max(0.0, timeout_s) if timeout_s == timeout_s else inf


def first_token_target_s(headers: Headers, fields: Mapping[str, Any]) -> float:
    """Returns the seconds in which the client expects a first token; infinite if it states none, or no number.

    The engine checks the values.
    """
    sent = fields.get("ttft_ms", next((value for name, value in headers if name == _TTFT), None))
    try:
        target_s = float(sent) / 1000 if isinstance(sent, int | float | bytes) else inf
    except (ValueError, OverflowError):
        return inf
    return target_s if target_s > 0 else inf


def retry_after_s(value: bytes) -> float | None:
    """Returns the seconds in a Retry-After header; None if it is empty or a date."""
    return float(value) if value.isdigit() and len(value) < 10 else None
