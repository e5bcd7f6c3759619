"""OpenAI's Responses over WebSocket: a client sends one request for a response after the other on one connection.

https://developers.openai.com/api/docs/guides/websocket-mode, and openai-python's ResponsesClientEvent and
ResponsesServerEvent: the client sends `response.create` with the fields of a body; it gets the events of its stream,
one a message. Responses with `store: false` are remembered as long as the connection lasts, so that
`previous_response_id` can continue them. `stream_id` names lanes that run beside each other; in a lane one response
follows the other. `generate: false` only remembers the input. `response.steer` gets its input back, in OpenAI's event
for models that are not steered.
"""

import asyncio
import logging
from contextlib import ExitStack
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

import msgspec

from mini_infer_apis.dialects.response_object import new_response
from mini_infer_apis.dialects.responses import RESPONSES_PATH
from mini_infer_apis.stored_responses.broken_stream import websocket_error
from mini_infer_apis.stored_responses.recorder import MAX_ERROR_BYTES, data_of, events_in
from mini_infer_apis.stored_responses.request import Turn
from mini_infer_apis.stored_responses.service import ResponsesService
from mini_infer_web.api_errors import ApiError, read_json_object
from mini_infer_web.asgi import Message, Receive, Scope, Send, error_in, owner_of, post_scope
from mini_infer_web.json_structure import check_structure

MAX_PENDING = 16
"""Most requests of one connection that are being answered or wait: more get a 429."""
LONGEST_STREAM_ID = 256
_BUG = ApiError(500, "the server failed at this request; its log says why", code="internal")
_STOPPING = ApiError(503, "this server is stopping: connect anew", code="stopping")
_RESTART = 1012
"""Close code in WebSocket's registry for a service that restarts."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Lane:
    """Requests that are answered one after the other."""

    stream_id: str | None
    pending: list[tuple[dict[str, Any], ExitStack]] = field(default_factory=list)
    """Bodies of requests that wait, and what reserves their memory."""
    is_answering: bool = False
    """True if a request is being answered, beside those that wait."""
    task: asyncio.Task[None] | None = None


class WebSocketSession:
    """The session of one connection."""

    def __init__(self, service: ResponsesService, scope: Scope, receive: Receive, send: Send) -> None:
        self._service, self._scope, self._receive, self._send = service, scope, receive, send
        self._owner, self._connection = owner_of(scope), f"connection {token_hex(16)}"
        self._lanes: dict[str | None, _Lane] = {}
        self._own_ids: list[str] = []
        """Responses that are remembered for the connection."""
        self._disconnected = asyncio.Event()
        self._writing = asyncio.Lock()
        self._is_stopping = False

    async def run(self) -> None:
        """Serves the connection until the client leaves."""
        await self._receive()
        await self._send({"type": "websocket.accept"})
        try:
            while (message := await self._receive())["type"] == "websocket.receive":
                await self._take(message.get("text") or message.get("bytes") or "")
        finally:
            self._disconnected.set()
            tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
            await asyncio.gather(*tasks, return_exceptions=True)
            self._service.delete_all(self._own_ids, self._connection)

    async def stop(self) -> None:
        """Ends the connection after the requests that are being answered: nothing new is accepted."""
        self._is_stopping = True
        if not self._lanes and not self._disconnected.is_set():
            async with self._writing:
                await self._send({"type": "websocket.close", "code": _RESTART, "reason": _STOPPING.message})

    async def send_event(self, event: bytes, stream_id: str | None) -> None:
        """Sends one message to the client: an event as JSON."""
        if self._disconnected.is_set():
            return
        if stream_id is not None:
            event = event[:-1] + b',"stream_id":' + msgspec.json.encode(stream_id) + b"}"
        async with self._writing:
            await self._send({"type": "websocket.send", "text": event.decode()})

    async def send_error(self, error: ApiError, stream_id: str | None) -> None:
        """Sends the answer to a request that is refused."""
        await self.send_event(msgspec.json.encode({"type": "error", "status": error.status} | error.body()), stream_id)

    async def _take(self, sent: str | bytes) -> None:
        """Handles one message of the client's."""
        raw = sent.encode() if isinstance(sent, str) else sent
        stream_id: str | None = None
        generator = self._service.generator
        try:
            if refusal := generator.refusal(self._scope):
                raise refusal
            with ExitStack() as reservation:
                reservation.enter_context(generator.reserve(self._scope, len(raw), await check_structure(raw)))
                event = read_json_object(raw)
                if event.get("type") == "response.steer":
                    await self.send_event(_steer_failed(event), None)
                    return
                stream_id = _stream_id(event)
                lane = self._lane_for(event, stream_id)
                lane.pending.append((event, reservation.pop_all()))
        except ApiError as error:
            await self.send_error(error, stream_id)
        else:
            if lane.task is None:
                lane.task = asyncio.create_task(self._run(lane))

    def _lane_for(self, event: dict[str, Any], stream_id: str | None) -> _Lane:
        """Returns the lane of an event. Raises ApiError if the event is refused."""
        if self._is_stopping:
            raise _STOPPING
        kind = event.pop("type", None)
        if kind != "response.create":
            message = f"type is {str(kind)[:100]!r}: this server takes response.create"
            raise ApiError(400, message, param="type", code="unsupported_value")
        if event.get("background"):
            raise ApiError(400, "background is not there over WebSocket", param="background", code="unsupported_value")
        if sum(lane.is_answering + len(lane.pending) for lane in self._lanes.values()) >= MAX_PENDING:
            message = f"{MAX_PENDING} responses of this connection are being made: wait for one"
            raise ApiError(429, message, code="too_many_responses")
        return self._lanes.setdefault(stream_id, _Lane(stream_id))

    async def _run(self, lane: _Lane) -> None:
        while lane.pending:
            (body, reservation), lane.is_answering = lane.pending.pop(0), True
            with reservation:
                if self._disconnected.is_set():
                    continue
                try:
                    await self._respond(body, reservation, lane.stream_id)
                except ApiError as error:
                    await self.send_error(error, lane.stream_id)
                except Exception:
                    log.exception("a request over WebSocket failed")
                    await self.send_error(_BUG, lane.stream_id)
            lane.is_answering = False
        del self._lanes[lane.stream_id]
        if self._is_stopping:
            await self.stop()

    async def _respond(self, body: dict[str, Any], reservation: ExitStack, stream_id: str | None) -> None:
        generates = body.pop("generate", None) is not False
        scope, relay = post_scope(self._scope, RESPONSES_PATH), _Relay(self, stream_id)
        elsewhere = self._service.generator.elsewhere
        if generates and await elsewhere(scope, body | {"stream": True}, self._until_disconnected, relay):
            return
        turn, passed = self._service.begin(body | {"stream": True}, self._owner, self._connection)
        body.clear()
        if turn.owner == self._connection:
            self._own_ids.append(turn.kept.id)
        if not generates:
            await self._store_without_output(turn, msgspec.json.decode(passed), stream_id)
            return
        bodies = [passed]
        del passed
        reservation.close()  # Whoever generates counts what it makes of it.
        answer = self._service.generator.answer_detached
        await self._service.generate(answer, turn, bodies, scope, self._until_disconnected, relay)

    async def _store_without_output(self, turn: Turn, body: dict[str, Any], stream_id: str | None) -> None:
        """Keeps a response without output, for others to continue."""
        model = self._service.generator.check(body)
        merged = body | msgspec.structs.asdict(turn.kept)
        response = new_response(merged, turn.kept.id, model, turn.kept.created_at, "completed")
        self._service.keep(turn, response)
        for number, kind in enumerate(("response.created", "response.completed")):
            event = {"type": kind, "response": response, "sequence_number": number}
            await self.send_event(msgspec.json.encode(event), stream_id)

    async def _until_disconnected(self) -> Message:
        await self._disconnected.wait()
        return {"type": "http.disconnect"}


class _Relay:
    """Relays an answer: its `send` turns events into messages."""

    def __init__(self, session: WebSocketSession, stream_id: str | None) -> None:
        self._session, self._stream_id = session, stream_id
        self._status = 0
        self._error_body = b""

    async def __call__(self, message: Message) -> None:
        """Sends each event of an ASGI message as a message of the WebSocket, and an error as an event."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status != 200:
            self._error_body = (self._error_body + message.get("body", b""))[:MAX_ERROR_BYTES]
            if not message.get("more_body"):
                await self._session.send_error(error_in(self._error_body, self._status), self._stream_id)
        else:
            for event in events_in(message.get("body", b"")):
                await self._send_event(data_of(event))

    async def _send_event(self, data: bytes) -> None:
        if data.startswith(b"{"):
            await self._session.send_event(websocket_error(data), self._stream_id)


def _steer_failed(event: dict[str, Any]) -> bytes:
    """Returns the answer to an attempt to steer a response: the input that was sent goes back."""
    error = {
        "type": "invalid_request_error",
        "code": "steering_not_supported",
        "message": "responses are not steered here: send the input in a response.create when this one has ended",
    }
    steer = {"input": event.get("input"), "previous_response_id": event.get("previous_response_id")}
    answer = {"type": "response.steer.failed", "error": error, "steer": steer, "sequence_number": 0}
    return msgspec.json.encode(answer)


def _stream_id(event: dict[str, Any]) -> str | None:
    stream_id = event.pop("stream_id", None)
    if stream_id is not None and (not isinstance(stream_id, str) or not 0 < len(stream_id) <= LONGEST_STREAM_ID):
        message = f"stream_id must be a string of 1 to {LONGEST_STREAM_ID} characters"
        raise ApiError(400, message, param="stream_id", code="invalid_value")
    return stream_id
