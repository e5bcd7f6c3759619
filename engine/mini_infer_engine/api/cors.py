"""ASGI middleware around all others: OPTIONS on every path, and CORS headers for pages from elsewhere
that are allowed.
"""

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_infer_web.cors import CorsPolicy


class Cors:
    """Adds the CORS headers of a `CorsPolicy` to answers, and answers OPTIONS."""

    def __init__(self, app: ASGIApp, policy: CorsPolicy, routes: list[BaseRoute]) -> None:
        """Takes the application's `routes`, for their methods."""
        self._app, self._policy, self._routes = app, policy, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers an ASGI request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        added = self._policy.answer_headers(scope["headers"])

        async def send_with_headers(message: Message) -> None:
            if added and message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in added:
                    headers.append(name.decode(), value.decode("latin-1"))
            await send(message)

        if scope["method"] != "OPTIONS":
            await self._app(scope, receive, send_with_headers)
            return
        answer = Response(status_code=204, headers={"allow": ", ".join(self._methods(scope))})
        answer.raw_headers += self._policy.preflight_headers(scope["headers"])
        await answer(scope, receive, send_with_headers)

    def _methods(self, scope: Scope) -> list[str]:
        """Returns the methods of the path, OPTIONS included."""
        found = {"OPTIONS"}
        for route in self._routes:
            match, _ = route.matches(scope)
            if match.value:
                found |= set(getattr(route, "methods", None) or ())
        return sorted(found)
