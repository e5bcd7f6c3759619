"""HTTP around the routes: request ids, body limit, and every error in its API's shape. Knows nothing of models."""

import asyncio
import hashlib
from collections.abc import Callable

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_infer_apis.dialects.anthropic_errors import errors_of
from mini_infer_contract.launch import CLIENT_HEADER, REQUEST_ID_HEADER
from mini_infer_contract.peer_auth import PEER_HEADER, PeerSecret
from mini_infer_engine.api.dialects.openai.shapes import encode_json
from mini_infer_web.api_errors import ApiError
from mini_infer_web.api_keys import presented_key
from mini_infer_web.http_server.peers import peer_of
from mini_infer_web.json_structure import check_structure
from mini_infer_web.request_body import check_media_type, too_large, unpacked_in_slices
from mini_infer_web.request_ids import request_id_in

_LONGEST_CLIENT = 200
_CLOSE = {"connection": "close"}
"""Headers that close the connection: the rest of the body would be taken for the next request."""


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns a JSON answer; `content` in bytes is JSON already."""
    body = content if isinstance(content, bytes) else encode_json(content)
    return Response(body, status, headers, "application/json")


def error_response(error: ApiError, scope: Scope) -> Response:
    """Returns an error in the shape of the API that the request's path belongs to."""
    body = errors_of(scope["path"]).body(error, scope.get("request_id", ""))
    return json_response(body, error.status, error.headers)


async def read_json(request: Request, max_bytes: int, timeout_s: float, grow: Callable[[int], None]) -> bytes:
    """Returns the whole body, its compression undone. Raises ApiError if it is no JSON by its header, too large, has
    too many values, or comes too slowly. `grow` takes its length so far, and raises ApiError if there is no room.
    """
    check_media_type(request.headers.get("content-type", ""))
    try:
        async with asyncio.timeout(timeout_s):
            body = await _read(request, max_bytes, grow)
    except TimeoutError:
        raise ApiError(
            408, f"the body has not come within {timeout_s:g} s (--body-timeout)", code="body_timeout", headers=_CLOSE
        ) from None
    encoding = request.headers.get("content-encoding", "")
    if encoding:

        def reserve(size_bytes: int) -> bool:
            grow(size_bytes)
            return True

        body = await unpacked_in_slices(body, encoding, max_bytes, reserve) or b""
    await check_structure(body)
    return body


async def _read(request: Request, max_bytes: int, grow: Callable[[int], None]) -> bytes:
    """Returns the body. Raises ApiError if it is larger than allowed; its length says so before it is read."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise too_large(max_bytes)
    parts, length = [], 0
    try:
        async for part in request.stream():
            length += len(part)
            if length > max_bytes:
                raise too_large(max_bytes)
            grow(length)
            parts.append(part)
    except ClientDisconnect:
        raise ApiError(499, "the client left before its request was complete") from None
    return b"".join(parts)


def client_of(request: Request, secret: PeerSecret | None) -> str:
    """Returns the name by which limits on one client count: the gateway's name for it, else its API key, else its
    address.

    The gateway's name counts only beside the token of the service's `secret`: a client that chose it would have no
    limit.
    """
    headers = request.headers
    if (client := headers.get(CLIENT_HEADER)) and secret is not None and secret.accepts(headers.get(PEER_HEADER)):
        return f"client {client[:_LONGEST_CLIENT]}"
    if key := presented_key(request.headers.raw):
        return "key " + hashlib.sha256(key).hexdigest()
    return f"peer {peer_of(request.client.host)}" if request.client is not None else ""


def request_id(request: Request) -> str:
    """Returns the id in force; see `RequestIds`."""
    chosen: str = request.scope["request_id"]
    return chosen


class RequestIds:
    """Takes the client's x-request-id, or makes one, and echoes it on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sets the id in the scope of an ASGI request, and on its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        chosen, refusal = request_id_in(scope["headers"])
        scope["request_id"] = chosen
        id_header = errors_of(scope["path"]).id_header

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = chosen
                if id_header:
                    headers[id_header] = chosen
            await send(message)

        if refusal is not None:
            await error_response(refusal, scope)(scope, receive, send_with_id)
            return
        await self._app(scope, receive, send_with_id)


def install_error_handlers(app: FastAPI) -> None:
    """Makes all errors, the framework's own included, bodies in the shape of their path's API."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error_response(error, request.scope)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        path = f"{request.method} {request.url.path}"
        if error.status_code == 404:
            return error_response(ApiError(404, f"{path}: there is no such path", code="unknown_path"), request.scope)
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            message = f"{path}: this path takes {allowed}"
            refusal = ApiError(405, message, code="method_not_allowed", headers=dict(error.headers or {}))
            return error_response(refusal, request.scope)
        return error_response(ApiError(error.status_code, str(error.detail)), request.scope)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        # Starlette raises it again for the server, which logs it.
        failure = ApiError(500, "the server failed at this request; its log says why", code="internal")
        return error_response(failure, request.scope)
