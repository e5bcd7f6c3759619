"""ASGI middleware that lets only requests with an API key pass; `mini_infer_web.api_keys` decides where
and which keys.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from mini_infer_engine.api.http import error_response
from mini_infer_web.api_keys import ApiKeys

GRANT = "mini_infer_key_grant"
"""Key in a scope's state: the rights of the request's API key; not there on a server without keys."""


class KeyCheck:
    """Checks API keys before everything that the server answers."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes an ASGI request on, or answers 401."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        refusal = self._keys.refusal(scope.get("method", "GET"), scope["path"], scope["headers"])
        if refusal is None:
            scope.setdefault("state", {})[GRANT] = self._keys.grant(scope["headers"])
            await self._app(scope, receive, send)
        else:
            # Of a WebSocket Starlette makes a refused handshake with this answer.
            await error_response(refusal, scope)(scope, receive, send)
