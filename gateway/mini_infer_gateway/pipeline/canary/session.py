"""Names the session of a request, so that all requests of one session are answered by one revision."""

from collections.abc import Mapping
from typing import Any, Final

from mini_infer_web.asgi import Headers

SESSION_HEADER: Final = b"x-session-id"
"""A client's header that names the session of its request."""
SESSION_FIELDS: Final = ("prompt_cache_key", "user")
"""Fields of bodies that name a session or a user, the first that is there counts."""


def session_of(headers: Headers, fields: Mapping[str, Any], request_id: str) -> str:
    """Returns the session that the client names, or the request's own id: each request is a session then."""
    sent = next((value for name, value in headers if name == SESSION_HEADER and value), b"")
    if sent:
        return sent.decode("latin-1")
    named = (fields.get(name) for name in SESSION_FIELDS)
    return next((name for name in named if isinstance(name, str) and name), request_id)
