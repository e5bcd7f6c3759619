"""/v1/chat/completions and /v1/completions: from a body to a generation, and from that to an answer or a stream."""

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mini_infer_contract.api_errors import ApiError, read_json_object
from mini_infer_contract.prompt import chat_prompt_ids, completion_prompt_ids, is_token_ids
from mini_infer_engine.api.generation import Generation
from mini_infer_engine.api.http import error_response, json_response, read_body, request_id
from mini_infer_engine.api.openai_replies import DONE, Kind, ReplyShape, error_event
from mini_infer_engine.api.openai_requests import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    bad_parameter,
    parse_body,
)
from mini_infer_engine.core_process.messages import ModelInfo
from mini_infer_engine.server.api_server_state import ApiServerState
from mini_infer_engine.text.output_text import TextDelta
from mini_infer_engine.text.validation import ParameterError, check_output_fits, check_prompt, check_sampling

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class Work:
    """A request that has been accepted."""

    generation: Generation
    shape: ReplyShape
    streams: bool
    include_usage: bool


async def _prepare(
    front: ApiServerState,
    model: ModelInfo,
    request: ChatRequest | CompletionRequest,
    body: dict[str, Any],
    reply_id: str,
) -> Work:
    text = front.text
    limit_name, max_tokens = request.output_limit
    if isinstance(request, ChatRequest):
        if text.encoder is None:
            raise ApiError(
                400, "chat needs a tokenizer, and this server runs without: send token ids to /v1/completions"
            )
        prompts = [await text.in_thread(chat_prompt_ids, text.encoder, body)]
        prompt_name = "messages"
    elif text.encoder is None or is_token_ids(request.prompt):
        prompts = completion_prompt_ids(None, body)  # nothing to tokenise: the way through a thread takes longer
        prompt_name = "prompt"
    else:
        prompts = await text.in_thread(completion_prompt_ids, text.encoder, body)
        prompt_name = "prompt"
    copies = request.n or 1
    if len(prompts) * copies > MAX_CHOICES:
        message = f"{len(prompts)} prompts with n = {copies} are more than {MAX_CHOICES} choices: send several requests"
        raise ApiError(400, message, param="n" if copies > 1 else "prompt")
    sampling = request.sampling(text.defaults, max_tokens)
    try:
        check_sampling(sampling, model.vocab_size, text.encoder is not None, limit_name)
        for prompt in prompts:
            check_prompt(prompt, model.max_model_len, model.vocab_size, prompt_name)
            if max_tokens is not None and body.get(limit_name) is not None:
                check_output_fits(len(prompt), max_tokens, model.max_model_len, limit_name)
    except ParameterError as error:
        raise bad_parameter(error) from None
    requests = front.make_requests(reply_id, prompts, copies, sampling, request.priority or 0, request.cache_salt or "")
    streams = bool(request.stream)
    return Work(
        Generation(requests, text.decoder, front.metrics, streams=streams, tells_tokens=bool(request.return_token_ids)),
        ReplyShape(
            "chat" if isinstance(request, ChatRequest) else "completion",
            reply_id,
            request.model or text.names[0],
            include_usage=request.include_usage,
            return_token_ids=bool(request.return_token_ids),
        ),
        streams,
        request.include_usage,
    )


class GenerationResponse(Response):
    """Reads a request, runs it for as long as its client listens, and answers whole or in events."""

    def __init__(self, front: ApiServerState, http_request: HttpRequest, kind: Kind) -> None:
        self.background = None
        self.status_code = 200
        self._front = front
        self._request = http_request
        self._kind: Kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. The request counts from here on, its body not read yet: a drain waits for all that have begun."""
        with self._front.counted():
            try:
                work = await self._accept()
            except ApiError as error:
                await error_response(error)(scope, receive, send)
            else:
                await self._run(work, scope, receive, send)

    async def _accept(self) -> Work:
        """ApiError: the request cannot be served."""
        body = read_json_object(await read_body(self._request, self._front.options.max_body_bytes))
        request: ChatRequest | CompletionRequest
        request = parse_body(body, ChatRequest) if self._kind == "chat" else parse_body(body, CompletionRequest)
        model = self._front.admit(request.model)
        return await _prepare(self._front, model, request, body, request_id(self._request))

    async def _run(self, work: Work, scope: Scope, receive: Receive, send: Send) -> None:
        core, generation = self._front.core, work.generation
        watcher = asyncio.create_task(_cancel_on_disconnect(receive, generation))
        try:
            core.submit(generation)
            if work.streams:
                await _stream(work, scope, receive, send)
            else:
                await _whole(work, scope, receive, send)
        except OSError:
            pass  # the client left while something was being sent
        finally:
            core.leave(generation)
            watcher.cancel()


async def _whole(work: Work, scope: Scope, receive: Receive, send: Send) -> None:
    generation = work.generation
    await generation.finished()
    if generation.error is not None:
        await error_response(generation.error)(scope, receive, send)
    elif not generation.cancelled:
        await json_response(work.shape.whole(generation.replies))(scope, receive, send)


async def _stream(work: Work, scope: Scope, receive: Receive, send: Send) -> None:
    generation = work.generation
    # Nothing is sent before the first token: until then an error still has its own status, and can be retried.
    news = await generation.news()
    if generation.error is not None and not news:
        await error_response(generation.error)(scope, receive, send)
        return
    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
    data = b"".join(work.shape.first_chunk(index) for index in range(len(generation.replies)))
    while news:
        data += b"".join([_chunk(work, index, piece) for index, piece in news])
        await send({"type": "http.response.body", "body": data, "more_body": True})
        data = b""
        news = await generation.news()
    await send({"type": "http.response.body", "body": _end(work)})


def _chunk(work: Work, index: int, piece: TextDelta) -> bytes:
    shape = work.shape
    if piece.is_last:
        return shape.last_chunk(index, work.generation.replies[index], piece)
    return shape.chunk(index, piece)


def _end(work: Work) -> bytes:
    generation = work.generation
    if generation.error is not None:
        return error_event(generation.error.body())
    return (work.shape.usage_chunk(generation.replies) if work.include_usage else b"") + DONE


async def _cancel_on_disconnect(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.cancel()
