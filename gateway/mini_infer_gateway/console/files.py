"""The files of the console's page, which `make console` builds from /console into `assets`, with their headers."""

import gzip
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

from mini_infer_web.api_docs import FAVICON_PATH
from mini_infer_web.asgi import Headers

ASSETS: Final = Path(__file__).parent / "assets"
POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    b"trusted-types 'none'"
)
"""Scripts and styles come from files alone, no text becomes script or markup, and nothing is loaded from elsewhere."""

PAGE_PATH: Final = "/"
ICON_PATH: Final = "/console/icon.svg"
_MEDIA_TYPES: Final = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
}
FILES: Final = {
    PAGE_PATH: "index.html",
    "/console/console.js": "console.js",
    "/console/console.css": "console.css",
    ICON_PATH: "icon.svg",
    FAVICON_PATH: "icon.svg",
}
"""Files of the page by path. They need no key, since they are the same for everybody."""


@dataclass(frozen=True, slots=True)
class ConsoleFile:
    """One file of the page."""

    media_type: bytes
    body: bytes
    packed: bytes
    """The body compressed by gzip."""
    tag: bytes
    """The ETag of the body."""

    def answer(self, request: Headers) -> tuple[int, Headers, bytes]:
        """Returns status, headers and body of the answer to a request with these headers."""
        headers: Headers = [
            (b"content-type", self.media_type),
            (b"content-security-policy", POLICY),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cross-origin-opener-policy", b"same-origin"),
            (b"cross-origin-resource-policy", b"same-origin"),
            (b"cache-control", b"no-cache"),
            (b"vary", b"accept, accept-encoding"),
            (b"etag", self.tag),
        ]
        sent = dict(request)
        if sent.get(b"if-none-match") == self.tag:
            return 304, headers, b""
        if b"gzip" in sent.get(b"accept-encoding", b""):
            headers.append((b"content-encoding", b"gzip"))
            return 200, headers, self.packed
        return 200, headers, self.body


@cache
def console_file(path: str) -> ConsoleFile:
    """Returns the file at one of the paths in `FILES`."""
    file = ASSETS / FILES[path]
    body = file.read_bytes()
    tag = b'"%s"' % sha256(body).hexdigest()[:16].encode()
    return ConsoleFile(_MEDIA_TYPES[file.suffix], body, gzip.compress(body, 9, mtime=0), tag)
