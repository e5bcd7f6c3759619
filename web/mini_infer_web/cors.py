"""Computes the headers that tell a browser which pages from elsewhere may use a server (CORS,
https://fetch.spec.whatwg.org/#http-cors).

Off unless origins are named. Pure: headers in, headers out; the same at the gateway and at an engine.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from mini_infer_contract.peer_auth import PEER_HEADER

Headers = list[tuple[bytes, bytes]]

ANY: Final = "*"
PREFLIGHT_MAX_AGE_S: Final = 600
"""Seconds for which a browser may cache the answer to a preflight request."""
EXPOSED: Final = b"x-request-id, request-id, retry-after"
"""Headers of answers that scripts may read, beside those that they always may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorsPolicy:
    """The pages that may use the server, and in which ways. The names and meanings are those of vLLM's flags."""

    allowed_origins: tuple[str, ...] = ()
    """Origins such as https://chat.example.com; "*" allows every page; if empty, CORS is off."""
    allowed_methods: tuple[str, ...] = (ANY,)
    allowed_headers: tuple[str, ...] = (ANY,)
    allow_credentials: bool = False
    """Browsers may send cookies and client certificates; an API key in a header is no credential of this kind."""

    def answer_headers(self, request: Iterable[tuple[bytes, bytes]]) -> Headers:
        """Returns the CORS headers of every answer to this request; none if its page may not use the server."""
        origin = _header(request, b"origin")
        if not origin or not self.allowed_origins:
            return []
        if ANY in self.allowed_origins and not self.allow_credentials:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", EXPOSED)]
        headers: Headers = [(b"vary", b"Origin")]
        if ANY in self.allowed_origins or origin.decode("latin-1") in self.allowed_origins:
            headers += [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", EXPOSED)]
            if self.allow_credentials:
                headers.append((b"access-control-allow-credentials", b"true"))
        return headers

    def preflight_headers(self, request: Iterable[tuple[bytes, bytes]]) -> Headers:
        """Returns the headers that the answer to a browser's OPTIONS has beside `answer_headers`."""
        request = list(request)
        method = _header(request, b"access-control-request-method")
        allowed = self.answer_headers(request)
        if not method or not any(name == b"access-control-allow-origin" for name, _ in allowed):
            return []
        # What was asked for instead of "*", which does not cover Authorization, nor anything beside credentials.
        requested = _header(request, b"access-control-request-headers").decode("latin-1").split(",")
        methods = method if ANY in self.allowed_methods else ", ".join(self.allowed_methods).encode()
        names = _without_peer_header(requested if ANY in self.allowed_headers else self.allowed_headers)
        headers: Headers = [
            (b"access-control-allow-methods", methods),
            (b"access-control-max-age", b"%d" % PREFLIGHT_MAX_AGE_S),
        ]
        return [*headers, (b"access-control-allow-headers", names)] if names else headers


def _without_peer_header(names: Iterable[str]) -> bytes:
    """Returns the names that pages may send: never the one that proves who administers an engine."""
    stripped = (name.strip() for name in names)
    return ", ".join(name for name in stripped if name and name.lower() != PEER_HEADER).encode("latin-1")


def _header(headers: Iterable[tuple[bytes, bytes]], header: bytes) -> bytes:
    return next((value for name, value in headers if name == header), b"")
