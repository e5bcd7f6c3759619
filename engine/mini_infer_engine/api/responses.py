"""/v1/responses of an engine: conversations become generations, and the engine keeps responses if no gateway does."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mini_infer_apis.dialects.response_object import RESPONSE_PREFIX, new_id
from mini_infer_apis.stored_responses.request import KEPT_HEADER, KeptRequest
from mini_infer_apis.stored_responses.service import COUNT_PATH, Generator, ResponsesService
from mini_infer_apis.stored_responses.store import ResponseStore
from mini_infer_apis.stored_responses.websocket import WebSocketSession
from mini_infer_engine.api.access_log import access_log_fields
from mini_infer_engine.api.answers import ResponseInputTokens
from mini_infer_engine.api.dialects.responses.responses_api import ResponsesDialect
from mini_infer_engine.api.generate import GenerationResponse, bad_parameter
from mini_infer_engine.api.http import error_response, json_response
from mini_infer_engine.api.images import image_files
from mini_infer_engine.api.state import ApiServerState
from mini_infer_engine.parsing.parser import check_parsing
from mini_infer_engine.text.validation import ParameterError
from mini_infer_web.api_errors import ApiError, read_json_object


def responses_service(state: ApiServerState, app: ASGIApp) -> ResponsesService:
    """Returns the service of one server; `app` is the whole of it, for requests without a client of their own."""
    options = state.options

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        response: Response
        if scope["path"] == COUNT_PATH:
            response = await _count(state, request)
        else:
            response = GenerationResponse(state, request, ResponsesDialect(_kept(request)))
        await response(scope, receive, send)

    async def read(scope: Scope, receive: Receive) -> bytes:
        return await state.read_json(Request(scope, receive))

    def check(body: dict[str, Any]) -> str:
        spec = ResponsesDialect(KeptRequest("")).parse(body, state.unknown_fields())
        try:
            if spec.parsing is not None:
                check_parsing(state.text.formats, spec.parsing)
            state.admit(spec.model)
        except ApiError as error:
            raise spec.in_clients_words(error) from None
        return spec.model or state.text.names[0]

    store = ResponseStore(options.responses_max_bytes, options.responses_ttl_s)
    generator = Generator(
        answer=answer,
        answer_detached=app,
        read=read,
        check=check,
        reserve=lambda scope, size_bytes, values: state.admission.body(size_bytes),
        max_body_bytes=options.max_body_bytes,
        may_be_second=True,
    )
    return ResponsesService(store, generator)


class WebSocketResponses:
    """An ASGI application for Responses over WebSocket."""

    def __init__(self, service: ResponsesService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one WebSocket until its client leaves."""
        await WebSocketSession(self._service, scope, receive, send).run()


class ServiceResponse(Response):
    """Hands a request on to the service."""

    def __init__(self, service: ResponsesService) -> None:
        self.background = None
        self.status_code = 200
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers an ASGI request with the service."""
        access_log_fields(scope)  # Shared from here on by the scopes that are made of this one.
        try:
            await self._service(scope, receive, send)
        except ApiError as error:
            await error_response(error, scope)(scope, receive, send)


def _kept(request: Request) -> KeptRequest:
    """Returns the facts that the server which keeps the response sends. Raises ApiError if they are malformed."""
    sent = request.headers.get(KEPT_HEADER)
    if sent is None:
        return KeptRequest(new_id(RESPONSE_PREFIX))
    try:
        return msgspec.json.decode(sent, type=KeptRequest)
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the header {KEPT_HEADER} is malformed: {error}", param=KEPT_HEADER) from None


async def _count(state: ApiServerState, request: Request) -> Response:
    """Answers with the number of tokens of the prompt that a response would be generated from."""
    raw = await state.read_json(request)
    with state.admission.body(len(raw)):
        spec = ResponsesDialect(KeptRequest("")).parse(read_json_object(raw), state.unknown_fields())
        state.check_model(spec.model)
        model = state.core.model
        if state.text.encoder is None or model is None:
            raise ApiError(400, "this server has no tokenizer, or still loads its model", code="no_tokenizer")
        try:
            with state.admission.fetched() as reserve:
                images = await image_files(state.text, model, spec.prompt_param, spec.images, reserve)
                job = spec.prompt_ids(state.text.encoder, state.text.limits(model.max_model_len), images)
                prompts = await state.text.in_slices(job, len(raw))
        except ParameterError as error:
            raise spec.in_clients_words(bad_parameter(error)) from None
        except ApiError as error:
            raise spec.in_clients_words(error) from None
    return json_response(ResponseInputTokens("response.input_tokens", len(prompts[0])))
