"""Which headers go on, in either direction. Pure; names are in lower case, as ASGI and our client give them."""

from mini_infer_apis.dialects.anthropic_errors import ID_HEADER
from mini_infer_contract.launch import REQUEST_ID_HEADER

Headers = list[tuple[bytes, bytes]]

PRIVATE_PREFIX = b"x-mini-infer-"
"""Words between gateway and engines: neither side of a client's."""
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
_REQUEST_OWN = frozenset((b"host", b"content-length", b"content-encoding", b"expect", REQUEST_ID_HEADER.encode()))
"""Written anew for the connection to the endpoint, which gets bodies without compression."""
_CREDENTIALS = frozenset((b"authorization", b"x-api-key", b"cookie"))
"""A client's proof towards the gateway, not towards every pod that a namespace may start."""
_RESPONSE_PRIVATE = frozenset((b"set-cookie", b"location", b"server", REQUEST_ID_HEADER.encode(), ID_HEADER.encode()))
"""An endpoint's own address and sessions mean nothing to a client of the gateway; the request's id is told by that."""


_NOT_TO_ENDPOINT = {
    False: _HOP_BY_HOP | _REQUEST_OWN | _CREDENTIALS,
    True: _HOP_BY_HOP | _REQUEST_OWN | {b"cookie"},
}
"""By whether an endpoint gets clients' keys."""
_NOT_TO_CLIENT = _HOP_BY_HOP | _RESPONSE_PRIVATE


def to_endpoint(headers: Headers, forward_authorization: bool = False) -> Headers:
    """A client's headers as an endpoint gets them."""
    return _without(headers, _NOT_TO_ENDPOINT[forward_authorization])


def to_client(headers: Headers, own: Headers) -> Headers:
    """An endpoint's headers as the client gets them: `own` replace those of the same name."""
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


def retry_after_s(value: bytes) -> float | None:
    """The seconds in a Retry-After header; None where it is empty or a date."""
    return float(value) if value.isdigit() and len(value) < 10 else None
