"""Serves /v1/responses at the gateway: stores responses here, and generates them as any other request.

This module knows neither streams nor routing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from secrets import token_hex
from typing import Any

import msgspec

from mini_infer_apis.dialects.responses import RESPONSES_PATH, chat_body
from mini_infer_apis.stored_responses.service import Generator, ResponsesService
from mini_infer_apis.stored_responses.store import ResponseStore
from mini_infer_apis.stored_responses.websocket import WebSocketSession
from mini_infer_gateway.fleet.registry import Fleet
from mini_infer_gateway.http.asgi import ClientDisconnectedError, body_memory_error, read_body
from mini_infer_gateway.memory import BodyBudget, BodyReservation
from mini_infer_gateway.paths import ENGINE_PATHS, EnginePath
from mini_infer_gateway.pipeline.clients import Clients
from mini_infer_gateway.pipeline.generate import Generate
from mini_infer_gateway.pipeline.responses.replicas import Replicas, ids_in
from mini_infer_gateway.pipeline.stages.resolve import requested_model
from mini_infer_gateway.settings import GatewaySettings
from mini_infer_web.api_keys import ApiKeys
from mini_infer_web.asgi import Receive, Scope, Send, receive_of
from mini_infer_web.body_fields import UnknownFields
from mini_infer_web.http_server.client_link import CLIENT_LINK
from mini_infer_web.json_structure import check_structure

_RESERVATION = "mini_infer_body_reservation"
"""Key in an ASGI scope: the bytes that the request has allocated from the budget of bodies."""


class Responses:
    """Handles all requests on these paths."""

    def __init__(
        self,
        settings: GatewaySettings,
        fleet: Fleet,
        generate: Generate,
        bodies: BodyBudget,
        limit_bytes: int,
        replicas: Replicas,
        clients: Clients,
        keys: ApiKeys,
    ) -> None:
        self._replicas, self._clients = replicas, clients
        self._settings, self._fleet, self._bodies = settings, fleet, bodies
        self._sessions: set[WebSocketSession] = set()
        self._generate: Callable[[EnginePath, Scope, Receive, Send], Awaitable[None]] = generate
        self.store = ResponseStore(limit_bytes, settings.responses_ttl_s)
        self.service = ResponsesService(
            self.store,
            Generator(
                answer=self._answer,
                answer_detached=self._answer_detached,
                read=self._read,
                check=self._check,
                reserve=self._room,
                max_body_bytes=settings.max_body_bytes,
                refusal=lambda scope: keys.refusal("POST", RESPONSES_PATH, scope["headers"]),
                elsewhere=self._elsewhere,
                may_be_second=False,
            ),
            tag=replicas.tag,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request; `scope` contains its "request_id". Raises ApiError if the gateway itself refuses it."""
        reservation = scope[_RESERVATION] = BodyReservation(self._bodies, self._clients.of(scope).pays_as(scope))
        scope.pop(CLIENT_LINK, None)  # A response that is made in the background outlives its client's connection.
        try:
            response_id, _, _ = scope["path"].removeprefix(f"{RESPONSES_PATH}/").partition("/")
            if owner := await self._replicas.owner(scope, [response_id]):
                body = await read_body(scope, receive, self._settings.max_body_bytes, reservation.grow)
                if await self._replicas.forward(owner, scope, body, receive, send, self._settings.idle_timeout_s):
                    return
                receive = receive_of(body, receive)
            await self.service(scope, receive, send)
        except ClientDisconnectedError:
            pass  # In the middle of its body.
        finally:
            reservation.release()

    async def websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one WebSocket connection."""
        session = WebSocketSession(self.service, scope, receive, send)
        self._sessions.add(session)
        try:
            await session.run()
        finally:
            self._sessions.discard(session)

    async def stop_gently(self) -> None:
        """Closes each connection when the response that it waits for has been sent."""
        await asyncio.gather(*(session.stop() for session in self._sessions), return_exceptions=True)

    async def _elsewhere(self, scope: Scope, body: dict[str, Any], receive: Receive, send: Send) -> bool:
        """Forwards the request to the replica that stores the response or the items that the body refers to."""
        owner = await self._replicas.owner(scope, ids_in(body))
        if owner is None:
            return False
        scope.setdefault("request_id", token_hex(16))
        idle_s = max(self._settings.idle_timeout_s, self._settings.head_timeout_s)
        return await self._replicas.forward(owner, scope, msgspec.json.encode(body), receive, send, idle_s)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        reservation: BodyReservation = scope[_RESERVATION]
        body = await read_body(scope, receive, self._settings.max_body_bytes, reservation.grow)
        if not reservation.grow(len(body), await check_structure(body)):
            raise body_memory_error()
        return body

    @contextmanager
    def _room(self, scope: Scope, size_bytes: int, values: int = 0) -> Iterator[None]:
        reservation = BodyReservation(self._bodies, self._clients.of(scope).pays_as(scope))
        try:
            if not reservation.grow(size_bytes, values):
                raise body_memory_error()
            yield
        finally:
            reservation.release()

    def _check(self, body: dict[str, Any]) -> str:
        """Checks the conversation's fields and the model's name. Returns the name by which engines know the model."""
        chat_body(body, UnknownFields(self._settings.unknown_fields))
        model = requested_model(ENGINE_PATHS[RESPONSES_PATH], body, self._fleet.catalog.listed)
        endpoints = self._fleet.endpoints
        served = (endpoints[name].endpoint.model for name in self._fleet.resolve(model) if name in endpoints)
        return next(served, model)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _RESERVATION in scope:
            # Decoded, looked up and encoded again: from now on `Generate` counts what it makes of it.
            size = next((int(value) for name, value in scope["headers"] if name == b"content-length"), 0)
            scope[_RESERVATION].settle(size)
        await self._generate(ENGINE_PATHS[scope["path"]], scope, receive, send)

    async def _answer_detached(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["request_id"] = token_hex(16)
        await self._answer(scope, receive, send)
