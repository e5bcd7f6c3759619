"""The page at /docs: Swagger UI, with its files from a package beside the server, so that it works without internet.

The page has no script of its own in it, so that its Content-Security-Policy allows none.
"""

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from mini_infer_web.api_errors import ApiError

DOCS_PATH: Final = "/docs"
OPENAPI_PATH: Final = "/openapi.json"
FAVICON_PATH: Final = "/favicon.ico"
"""Every browser requests it; there is none."""

_PACKAGE: Final = "fastapi_offline"
"""Package whose wheel has the files of swagger-ui-dist in `static`; nothing of it is imported."""
_PAGE: Final = b"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>mini-infer: API</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><link rel="stylesheet" href="docs/swagger-ui.css"></head>
<body><div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script><script src="docs/begin.js"></script></body></html>
"""
_BEGIN: Final = b'SwaggerUIBundle({ url: "openapi.json", dom_id: "#swagger-ui", deepLinking: true });\n'
_POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Swagger UI sets style attributes; scripts come from files alone."""
_JAVASCRIPT: Final = "text/javascript; charset=utf-8"


@dataclass(frozen=True, slots=True)
class DocsFile:
    """One file of the page."""

    media_type: str
    body: bytes

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the file's answer, beside type and length."""
        return [
            (b"content-security-policy", _POLICY),
            (b"x-content-type-options", b"nosniff"),
            (b"cache-control", b"max-age=3600"),
        ]


DOCS_PATHS: Final = (
    DOCS_PATH,
    *(f"{DOCS_PATH}/{name}" for name in ("swagger-ui.css", "swagger-ui-bundle.js", "begin.js")),
)


@cache
def docs_file(path: str) -> DocsFile:
    """Returns the file at one of `DOCS_PATHS`. Raises ApiError 501 if the package with Swagger UI is not installed."""
    if path == DOCS_PATH:
        return DocsFile("text/html; charset=utf-8", _PAGE)
    name = path.removeprefix(f"{DOCS_PATH}/")
    if name == "begin.js":
        return DocsFile(_JAVASCRIPT, _BEGIN)
    return DocsFile("text/css; charset=utf-8" if name.endswith(".css") else _JAVASCRIPT, _packaged(name))


def _packaged(name: str) -> bytes:
    spec = importlib.util.find_spec(_PACKAGE)
    folders = (spec.submodule_search_locations if spec else None) or []
    for folder in folders:
        if (file := Path(folder) / "static" / name).is_file():
            return file.read_bytes()
    message = f"{DOCS_PATH} needs {_PACKAGE.replace('_', '-')}, which is not installed: read {OPENAPI_PATH} instead"
    raise ApiError(501, message, code="no_docs")
