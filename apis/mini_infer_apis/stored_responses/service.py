"""Serves /v1/responses and all below it in a server that keeps responses: a gateway, or an engine that has none before
it.

Another ASGI application generates, which gets complete conversations and does not know what is kept. This one looks up
the response that a request continues, records answers as they pass, and answers for what it keeps. docs/adr/0030 says
why it stands here.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec

from mini_infer_apis.dialects.response_object import new_response
from mini_infer_apis.dialects.responses import RESPONSES_PATH
from mini_infer_apis.dialects.responses_request import Item
from mini_infer_apis.stored_responses.background import BackgroundResponse
from mini_infer_apis.stored_responses.broken_stream import StreamErrors
from mini_infer_apis.stored_responses.conversation import not_found, page_of
from mini_infer_apis.stored_responses.query import RetrieveQuery, read_query
from mini_infer_apis.stored_responses.recorder import Recorder
from mini_infer_apis.stored_responses.request import KEPT_HEADER, StoreView, Turn, begin_turn
from mini_infer_apis.stored_responses.store import LostResponseError, Owners, ResponseStore, StoredResponse
from mini_infer_web.api_errors import ApiError, read_json_object
from mini_infer_web.asgi import (
    STREAM_HEADERS,
    Application,
    Message,
    Receive,
    Scope,
    Send,
    owner_of,
    post_scope,
    query_of,
    receive_of,
    send_json,
    with_body,
)
from mini_infer_web.fair_budget import has_room

COUNT_PATH = f"{RESPONSES_PATH}/input_tokens"
COMPACT_PATH = f"{RESPONSES_PATH}/compact"
"""A path of OpenAI's that is not served here: it is no response's id either."""
MAX_BACKGROUND = 1024
"""Most responses without a client that are generated at once: each retains its request's body. A key gets its share of
them.
"""
_KEPT = KEPT_HEADER.encode()


def is_responses_path(path: str) -> bool:
    """True if this application answers the path."""
    return path == RESPONSES_PATH or path.startswith(RESPONSES_PATH + "/")


def methods_of(path: str) -> frozenset[str]:
    """Returns the methods of one of its paths; none if there is no such path."""
    if path in (RESPONSES_PATH, COUNT_PATH):
        return frozenset(("POST",))
    if path == COMPACT_PATH:
        return frozenset()
    _, _, what = path.removeprefix(RESPONSES_PATH + "/").partition("/")
    return _METHODS.get(what, frozenset())


_METHODS = {"": frozenset(("GET", "DELETE")), "cancel": frozenset(("POST",)), "input_items": frozenset(("GET",))}
"""Methods by the part of the path that follows the id of a response."""


async def _nowhere(scope: Scope, body: dict[str, Any], receive: Receive, send: Send) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """The application that generates, and the functions that the service needs of it."""

    answer: Application
    """Answers POST of complete conversations to /v1/responses and to /v1/responses/input_tokens."""
    answer_detached: Application
    """Answers as `answer` does, for requests that are no client's own, such as one in the background."""
    read: Callable[[Scope, Receive], Awaitable[bytes]]
    """Reads a request's body. Raises ApiError if it is too large, or no JSON by its header."""
    check: Callable[[dict[str, Any]], str]
    """Returns the model's name in the answer to a complete conversation. Raises ApiError if it is clear at once that
    there is none.
    """
    reserve: Callable[[Scope, int, int], AbstractContextManager[None]]
    """Reserves memory for so many bytes and JSON values that do not come by `read`, for the client of a scope. Raises
    ApiError if there is none now.
    """
    max_body_bytes: int
    """Most bytes of a body that it answers."""
    may_be_second: bool
    """True if another server that keeps responses may stand before it, and says so with `KEPT_HEADER`."""
    refusal: Callable[[Scope], ApiError | None] = lambda scope: None
    """Returns the error of a client whose key has become invalid since its connection began."""
    elsewhere: Callable[[Scope, dict[str, Any], Receive, Send], Awaitable[bool]] = _nowhere
    """Has a request answered by another server that keeps the response which its body continues. Returns False if there
    is none.
    """


class ResponsesService:
    """Answers all clients' requests to /v1/responses and below."""

    def __init__(
        self, store: ResponseStore, generator: Generator, clock: Callable[[], float] = time.monotonic, tag: str = ""
    ) -> None:
        """Takes a hexadecimal `tag`, which is written into the ids of responses."""
        self.store, self.generator, self._clock, self._tag = store, generator, clock, tag
        self._background: dict[str, tuple[BackgroundResponse, asyncio.Task[None]]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers an ASGI request. Raises ApiError as long as nothing was sent."""
        path, method = scope["path"], scope["method"]
        if path in (RESPONSES_PATH, COUNT_PATH):
            _require(method, "POST", path)
            await self._post(scope, receive, send)
            return
        if path == COMPACT_PATH:
            message = f"{path} is not supported: contexts are not compacted here, send the items that are to be kept"
            raise ApiError(404, message, code="unsupported_path")
        response_id, _, what = path.removeprefix(RESPONSES_PATH + "/").partition("/")
        owners = frozenset((owner_of(scope),))
        if what == "cancel":
            _require(method, "POST", path)
            await send_json(send, self._cancel(response_id, owners))
        elif what == "input_items":
            _require(method, "GET", path)
            await send_json(send, self._input_items(response_id, owners, query_of(scope)))
        elif what:
            raise ApiError(404, f"{method} {path}: there is no such path", code="unknown_path")
        elif method == "DELETE":
            await send_json(send, self._delete(response_id, owners))
        else:
            _require(method, "GET", path, "GET or DELETE")
            await self._retrieve(self._entry(response_id, owners), query_of(scope), send)

    async def close(self) -> None:
        """Ends the responses that run in the background."""
        tasks = [task for _, task in self._background.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- generating

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.generator.may_be_second and any(name == _KEPT for name, _ in scope["headers"]):
            await self.generator.answer(scope, receive, send)  # It is kept by whoever has sent it on.
            return
        body = read_json_object(await self.generator.read(scope, receive))
        if await self.generator.elsewhere(scope, body, receive, send):
            return
        turn, passed = self.begin(body, owner_of(scope))
        del body
        if scope["path"] == COUNT_PATH:
            await self.generator.answer(with_body(scope, len(passed), []), receive_of(passed, receive), send)
        elif turn.kept.background:
            await self._begin_background(turn, passed, scope, send)
        else:
            bodies = [passed]
            del passed
            await self.generate(self.generator.answer, turn, bodies, scope, receive, send)

    def begin(self, body: dict[str, Any], owner: str, connection: str = "") -> tuple[Turn, bytes]:
        """Returns a client's body as a turn, and the body for the generating server. Raises ApiError 400 as
        `begin_turn` does.
        """
        now_s, created_at = self._clock(), int(time.time())
        view = StoreView(self.store, owner, now_s, created_at, self.generator.max_body_bytes, self._tag, connection)
        return begin_turn(body, view)

    async def generate(
        self, answer: Application, turn: Turn, bodies: list[bytes], scope: Scope, receive: Receive, send: Send
    ) -> dict[str, Any] | None:
        """Has a response generated, and keeps it before its end is sent. Returns it; None if there is none.

        The body is taken out of its list, so that it is not retained while the response is generated.
        """
        recorder, errors, passed = Recorder(), StreamErrors(), bodies.pop()

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                recorder.start(message["status"], message["headers"])
                await send(message)
                return
            body, more = errors.translated(message.get("body", b"")), message.get("more_body", False)
            if recorder.is_whole and body:
                try:
                    memory.enter_context(self.generator.reserve(scope, len(body), 0))
                except ApiError:
                    recorder.give_up()
            if recorder.push(body, more):
                self.keep(turn, recorder.response)
            await send({**message, "body": body})

        made, inner_receive = self._scope(scope, turn, len(passed)), receive_of(passed, receive)
        del passed
        with ExitStack() as memory:
            await answer(made, inner_receive, note)
        return recorder.response

    def keep(self, turn: Turn, response: dict[str, Any] | None) -> None:
        """Keeps a complete response, if the turn asks for it and its engine did not answer with another's id."""
        if response is None or turn.owner is None:
            return
        if response["id"] == turn.kept.id or response["id"] not in self.store:
            self.store.put(turn.entry(response), self._clock())

    def delete_all(self, response_ids: Iterable[str], connection: str) -> None:
        """Deletes what was remembered for one connection alone, which has ended."""
        for response_id in response_ids:
            self.store.delete(response_id, frozenset((connection,)), self._clock())

    def _scope(self, scope: Scope, turn: Turn, size_bytes: int) -> Scope:
        return with_body(scope, size_bytes, [(_KEPT, msgspec.json.encode(turn.kept))])

    async def _begin_background(self, turn: Turn, passed: bytes, scope: Scope, send: Send) -> None:
        body = msgspec.json.decode(passed)
        model, response_id, streams = self.generator.check(body), turn.kept.id, bool(body.get("stream"))
        own, all_running = sum(one.client == turn.client for one, _ in self._background.values()), len(self._background)
        if all_running >= MAX_BACKGROUND or (turn.client and not has_room(own, all_running, 1, MAX_BACKGROUND)):
            message = f"{all_running} responses are generated in the background: send the request again later"
            raise ApiError(429, message, code="queue_full", headers={"retry-after": "1"})
        merged = body | msgspec.structs.asdict(turn.kept)
        response = new_response(merged, response_id, model, turn.kept.created_at, "queued")
        running = BackgroundResponse(self.store, turn, response, self._clock, keeps_events=streams)
        bodies = [msgspec.json.encode(body | {"stream": True})]
        detached = self._scope(post_scope(scope, RESPONSES_PATH), turn, len(bodies[0]))
        task = asyncio.create_task(running.run(self.generator.answer_detached, detached, bodies))
        self._background[response_id] = running, task
        task.add_done_callback(lambda _: self._background.pop(response_id, None))
        if streams:
            del body, merged, passed
            await _stream(running, 0, send)
        else:
            await send_json(send, response)

    # -- what is kept

    def _entry(self, response_id: str, owners: Owners) -> StoredResponse:
        entry = self.store.get(response_id, owners, self._clock())
        if entry is None:
            raise not_found(response_id)
        return entry

    async def _retrieve(self, entry: StoredResponse, query: dict[str, str], send: Send) -> None:
        parsed = read_query(query, RetrieveQuery)
        if not parsed.stream:
            await send_json(send, entry.response)
            return
        begin = parsed.starting_after + 1
        if entry.events is None:
            message = "Only a response that was created with background and stream can be streamed again."
            raise ApiError(400, message, param="stream", code="invalid_value")
        running = self._background.get(entry.response_id)
        if running is not None:
            await _stream(running[0], begin, send)
        else:
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            await send({"type": "http.response.body", "body": b"".join(entry.events[begin:])})

    def _cancel(self, response_id: str, owners: Owners) -> bytes:
        """Cancels a response and returns it, which is over then."""
        entry = self._entry(response_id, owners)
        if not entry.is_background:
            raise ApiError(400, "Cannot cancel a synchronous response.", param="response_id", code="invalid_value")
        if response_id in self._background:
            self._background[response_id][0].cancel()
        return self._entry(response_id, owners).response

    def _delete(self, response_id: str, owners: Owners) -> dict[str, Any]:
        self._entry(response_id, owners)
        if response_id in self._background:
            self._background[response_id][0].cancel()
        self.store.delete(response_id, owners, self._clock())
        return {"id": response_id, "object": "response", "deleted": True}

    def _input_items(self, response_id: str, owners: Owners, query: dict[str, str]) -> dict[str, Any]:
        """Returns a page of all input that led to the response, the history before it included."""
        entry = self._entry(response_id, owners)
        try:
            before = self.store.chain(entry.previous_id, owners, self._clock()) if entry.previous_id else []
        except LostResponseError:
            before = []  # What is left of it is told.
        items: list[Item] = []
        for earlier in before:
            items += msgspec.json.decode(earlier.items) + msgspec.json.decode(earlier.response)["output"]
        return page_of(items + msgspec.json.decode(entry.items), query)


async def _stream(running: BackgroundResponse, begin: int, send: Send) -> None:
    """Sends events from this number on. A client that leaves ends nothing but this."""
    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
    async for event in running.events(begin):
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _require(method: str, required: str, path: str, described: str = "") -> None:
    if method != required and not (required == "GET" and method == "HEAD"):
        headers = {"allow": required}
        message = f"{method} {path}: this path takes {described or required}"
        raise ApiError(405, message, code="method_not_allowed", headers=headers)
