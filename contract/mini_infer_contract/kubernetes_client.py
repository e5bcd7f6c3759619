"""Requests to a Kubernetes API server over aiohttp: paths in, JSON out, errors with the server's own sentence.

The one module through which gateway and operator speak to it. It knows no kinds and no retries. The engine never
imports it, so aiohttp is a requirement of the extras `gateway` and `operator` alone.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Self

import aiohttp

from mini_infer_contract.kubernetes_access import ClusterAccess

REQUEST_TIMEOUT_S = 30.0
UNAUTHORIZED = 401

Object = dict[str, Any]


RequestSeen = Callable[[str, str, Mapping[str, str], int | None], None]
"""Method, path, query, and the status of the answer: None where none came."""


class ApiError(Exception):
    """The API server answered with an error status."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}" if reason else f"{status}: {message}")
        self.status = status
        self.reason = reason
        """metav1.Status.reason, such as Forbidden, AlreadyExists or Expired; "" where the answer has none."""
        self.message = message
        """metav1.Status.message: the server's sentence, without the HTTP around it."""


class KubernetesClient:
    """A pool of connections to one API server.

    Errors of the network are aiohttp's (`ClientError`, `TimeoutError`); AccessError, an OSError, means that credentials
    could not be had this time. All of them may pass.
    """

    def __init__(self, access: ClusterAccess, seen: RequestSeen = lambda *_: None) -> None:
        """Must be called while an event loop runs. `seen` is told of each request."""
        self._access = access
        self._seen = seen
        self._renewing = asyncio.Lock()
        connector = aiohttp.TCPConnector(ssl=access.tls if access.tls is not None else True)
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False)

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        timeouts: aiohttp.ClientTimeout | None = None,
    ) -> aiohttp.ClientResponse:
        """The response with its body unread, for watches; who calls releases it. ApiError for a status from 400.

        `path` is absolute, such as /api/v1/pods. The default, REQUEST_TIMEOUT_S, covers the body too.
        """
        headers = {"Accept": "application/json"}
        authorization = await self._authorization()
        if authorization:
            headers["Authorization"] = authorization
        data = None
        if body is not None:
            headers["Content-Type"] = content_type
            data = json.dumps(body).encode()
        status: int | None = None
        try:
            response = await self._session.request(
                method,
                self._access.server + path,
                params=query,
                data=data,
                headers=headers,
                allow_redirects=False,
                timeout=timeouts or aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
            )
            status = response.status
        finally:
            self._seen(method, path, query or {}, status)
        if response.status == UNAUTHORIZED:
            self._access.forget()
        if response.status >= 400:
            async with response:
                raise _error_of(response, await response.read())
        return response

    async def request(self, method: str, path: str, **options: Any) -> Object:
        """The same with the answer read as JSON."""
        async with await self.open(method, path, **options) as response:
            body = await response.read()
            try:
                return dict(json.loads(body))
            except (ValueError, TypeError):
                raise ApiError(response.status, "", f"the answer is no JSON object: {body[:100]!r}") from None

    async def _authorization(self) -> str | None:
        """The header's value. A credential plugin runs in a thread, once for all requests that wait for it."""
        plugin = self._access.plugin
        if plugin is None:
            return self._access.authorization()
        async with self._renewing:
            try:
                return await asyncio.to_thread(self._access.authorization)
            except asyncio.CancelledError:
                plugin.stop()  # or its thread would hold up the end of the process
                raise


async def lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The events of a watch, as lines of any length: an object may be longer than the stream reader's line limit."""
    buffer = b""
    async for piece in response.content.iter_any():
        *lines, buffer = (buffer + piece).split(b"\n")
        for line in lines:
            if line:
                yield line


def _error_of(response: aiohttp.ClientResponse, body: bytes) -> ApiError:
    try:
        status = json.loads(body)
        return ApiError(response.status, str(status.get("reason", "")), str(status["message"]))
    except (ValueError, KeyError, AttributeError, TypeError):
        text = body[:300].decode(errors="replace").strip()
        return ApiError(response.status, "", text or response.reason or "no explanation")
