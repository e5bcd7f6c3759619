"""Decides whether a request for a WebSocket may have it (RFC 6455, 4.2.1). Pure: a request's head in, an error out."""

import base64
import binascii
from collections.abc import Iterable

from mini_infer_web.api_errors import ApiError


def websocket_refusal(method: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> ApiError | None:
    """Returns the error of a handshake that cannot succeed; None if it can. Header names are in lower case."""
    found: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        found.setdefault(name, []).append(value.strip())
    if method != b"GET" or version != "1.1":
        return _bad(f"is for GET over HTTP/1.1, not {method.decode('latin-1')} over HTTP/{version}")
    if b"transfer-encoding" in found or any(value != b"0" for value in found.get(b"content-length", [])):
        return _bad("has no body")
    if found.get(b"sec-websocket-version") != [b"13"]:
        message = "a WebSocket here is of version 13: send Sec-WebSocket-Version: 13, or leave out Upgrade"
        response_headers = {"upgrade": "websocket", "sec-websocket-version": "13"}
        return ApiError(426, message, param="Sec-WebSocket-Version", code="invalid_upgrade", headers=response_headers)
    keys = found.get(b"sec-websocket-key", [])
    if len(keys) != 1 or not _is_key(keys[0]):
        return _bad("needs one Sec-WebSocket-Key of 16 bytes in base64")
    return None


def _bad(what: str) -> ApiError:
    return ApiError(
        400, f"the handshake of a WebSocket {what}: send that, or leave out Upgrade", code="invalid_upgrade"
    )


def _is_key(value: bytes) -> bool:
    try:
        return len(base64.b64decode(value, validate=True)) == 16
    except binascii.Error:
        return False
