"""The routes of the HTTP process. The modules that they call do the work."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast, get_args

from fastapi import FastAPI, Request
from msgspec import UNSET
from starlette.responses import Response, StreamingResponse
from starlette.routing import WebSocketRoute

from mini_infer_apis.dialects.anthropic import COUNT_TOKENS_PATH, MESSAGES_PATH
from mini_infer_apis.dialects.kv_hints import KV_HINTS_PATH
from mini_infer_apis.dialects.responses import RESPONSES_PATH
from mini_infer_apis.stored_responses.service import COMPACT_PATH, COUNT_PATH, ResponsesService
from mini_infer_contract import launch
from mini_infer_engine import __version__
from mini_infer_engine.api.access_log import AccessLog
from mini_infer_engine.api.admin_guard import AdminGuard
from mini_infer_engine.api.answers import Load, Model, ModelList, Version
from mini_infer_engine.api.cors import Cors
from mini_infer_engine.api.dialects.anthropic.messages_api import MessagesDialect
from mini_infer_engine.api.dialects.base import Dialect
from mini_infer_engine.api.dialects.invocation import InvocationDialect
from mini_infer_engine.api.dialects.openai.chat import ChatDialect
from mini_infer_engine.api.dialects.openai.chat_batch import BatchChatDialect
from mini_infer_engine.api.dialects.openai.completions import CompletionDialect
from mini_infer_engine.api.dialects.pooling.classify import CLASSIFY_PATHS, ClassifyDialect
from mini_infer_engine.api.dialects.pooling.embeddings import EMBEDDINGS_PATH, EmbeddingDialect
from mini_infer_engine.api.dialects.pooling.rerank import RERANK_PATHS, RerankDialect
from mini_infer_engine.api.dialects.pooling.score import SCORE_PATHS, ScoreDialect
from mini_infer_engine.api.generate import GenerationResponse
from mini_infer_engine.api.http import RequestIds, install_error_handlers, json_response
from mini_infer_engine.api.key_check import KeyCheck
from mini_infer_engine.api.kv_hints import take_kv_hints
from mini_infer_engine.api.kv_prefetch import announced_sessions
from mini_infer_engine.api.openapi.document import document
from mini_infer_engine.api.render import render_chat, render_completion
from mini_infer_engine.api.responses import ServiceResponse, WebSocketResponses, responses_service
from mini_infer_engine.api.state import ApiServerState
from mini_infer_engine.api.tokenize import count_tokens, detokenize, tokenize
from mini_infer_engine.core_process.messages import ModelInfo
from mini_infer_web.api_docs import DOCS_PATHS, FAVICON_PATH, OPENAPI_PATH, docs_file
from mini_infer_web.api_errors import ApiError, read_json_object
from mini_infer_web.api_keys import ApiKeys
from mini_infer_web.asgi import pieces_of

_CREATED = int(time.time())
"""The `created` of a model: the time when this server started, as in vLLM."""


def make_app(state: ApiServerState, keys: ApiKeys | None = None, guard: AdminGuard | None = None) -> FastAPI:
    """Returns the application on one front.

    `keys` are those of clients; if None, none is needed. `guard` protects its admin paths.
    """
    guard = guard or AdminGuard(keys=keys)
    app = FastAPI(title="mini-infer", version=__version__, openapi_url=None, redirect_slashes=False)
    if keys:
        app.add_middleware(KeyCheck, keys=keys)
    app.add_middleware(RequestIds)
    if state.options.access_log:
        app.add_middleware(AccessLog)
    app.add_middleware(Cors, policy=state.options.cors, routes=app.router.routes)
    install_error_handlers(app)
    service = responses_service(state, app)

    def loaded() -> ModelInfo | None:
        return state.core.model

    for path, method, handler in (
        ("/v1/chat/completions", "POST", lambda request: _generate(state, request, ChatDialect())),
        ("/v1/completions", "POST", lambda request: _generate(state, request, CompletionDialect())),
        ("/v1/chat/completions/batch", "POST", lambda request: _generate(state, request, BatchChatDialect())),
        (KV_HINTS_PATH, "POST", lambda request: take_kv_hints(state, request)),
        ("/invocations", "POST", lambda request: _generate(state, request, InvocationDialect())),
        ("/v1/chat/completions/render", "POST", lambda request: render_chat(state, request)),
        ("/v1/completions/render", "POST", lambda request: render_completion(state, request)),
        (EMBEDDINGS_PATH, "POST", lambda request: _generate(state, request, EmbeddingDialect(loaded))),
        *((path, "POST", lambda request: _generate(state, request, ScoreDialect(loaded))) for path in SCORE_PATHS),
        *((path, "POST", lambda request: _generate(state, request, RerankDialect(loaded))) for path in RERANK_PATHS),
        *(
            (path, "POST", lambda request: _generate(state, request, ClassifyDialect(loaded)))
            for path in CLASSIFY_PATHS
        ),
        (MESSAGES_PATH, "POST", lambda request: _generate(state, request, MessagesDialect())),
        (COUNT_TOKENS_PATH, "POST", lambda request: count_tokens(state, request)),
        ("/v1/models", "GET", lambda request: _models(state)),
        ("/v1/models/{name:path}", "GET", lambda request: _model(state, request)),
        ("/tokenize", "POST", lambda request: tokenize(state, request)),
        ("/detokenize", "POST", lambda request: detokenize(state, request)),
        *((path, "GET", lambda request: _docs(request.url.path)) for path in DOCS_PATHS),
        (FAVICON_PATH, "GET", lambda request: _nothing()),
        (OPENAPI_PATH, "GET", lambda request: _openapi()),
        ("/health", "GET", lambda request: _health_as_vllm(state)),
        ("/ping", "GET", lambda request: _health_as_vllm(state)),
        ("/ping", "POST", lambda request: _health_as_vllm(state)),
        ("/version", "GET", lambda request: _version()),
        ("/load", "GET", lambda request: _load(state)),
        ("/tokenizer_info", "GET", lambda request: _tokenizer_info(state)),
        (launch.PROMPT_ASSETS_PATH, "GET", lambda request: _prompt_assets(state, request)),
    ):
        _route(app, path, [method], handler)
    _add_admin_routes(app, state, guard)
    for path, methods in (
        (RESPONSES_PATH, ["POST"]),
        (COUNT_PATH, ["POST"]),
        (COMPACT_PATH, ["POST"]),
        (f"{RESPONSES_PATH}/{{response_id}}", ["GET", "DELETE"]),
        (f"{RESPONSES_PATH}/{{response_id}}/cancel", ["POST"]),
        (f"{RESPONSES_PATH}/{{response_id}}/input_items", ["GET"]),
    ):
        _route(app, path, methods, lambda request: _as_response(service))
    app.router.routes.append(WebSocketRoute(RESPONSES_PATH, WebSocketResponses(service)))
    return app


def make_admin_app(state: ApiServerState) -> FastAPI:
    """Returns the application of `--admin-socket`: admin paths and probes alone, for users who may open the socket."""
    app = FastAPI(title="mini-infer", version=__version__, openapi_url=None, redirect_slashes=False)
    app.add_middleware(RequestIds)
    install_error_handlers(app)
    _add_admin_routes(app, state, None)
    return app


def _add_admin_routes(app: FastAPI, state: ApiServerState, guard: AdminGuard | None) -> None:
    """Adds probes, and paths that change the engine or show its cache, behind `guard` if there is one."""

    def guarded(request: Request) -> None:
        if guard is None:
            return
        peer = request.client.host if request.client else None
        if refusal := guard.refusal(request.url.path, request.headers, request.headers.raw, peer):
            raise refusal

    async def start_drain(request: Request) -> Response:
        guarded(request)
        return await _start_drain(state)

    async def switch_role(request: Request) -> Response:
        guarded(request)
        return await _switch_role(state, request)

    async def kv_snapshot(request: Request) -> Response:
        guarded(request)
        return await _kv_snapshot(state)

    async def prefetch(request: Request) -> Response:
        guarded(request)
        return await _prefetch(state, request)

    for path, method, handler in (
        (launch.HEALTH_PATH, "GET", lambda request: _health(state)),
        (launch.READY_PATH, "GET", lambda request: _ready(state)),
        (launch.METRICS_PATH, "GET", lambda request: _metrics(state)),
        (launch.DRAIN_PATH, "POST", start_drain),
        (launch.DRAIN_PATH, "GET", lambda request: _drain_state(state)),
        (launch.ROLE_PATH, "POST", switch_role),
        (launch.ROLE_PATH, "GET", lambda request: _role(state)),
        (launch.KV_SNAPSHOT_PATH, "GET", kv_snapshot),
        (launch.KV_PREFETCH_PATH, "POST", prefetch),
    ):
        _route(app, path, [method], handler)


def _route(app: FastAPI, path: str, methods: list[str], handler: Callable[[Request], Awaitable[Response]]) -> None:
    async def endpoint(request: Request) -> Response:
        return await handler(request)

    app.add_route(path, endpoint, methods=methods)


async def _as_response(service: ResponsesService) -> Response:
    return ServiceResponse(service)


async def _generate(state: ApiServerState, request: Request, dialect: Dialect) -> Response:
    return GenerationResponse(state, request, dialect)


async def _health(state: ApiServerState) -> Response:
    """Answers 200 if the process is live: its core makes progress, or still starts."""
    content = {
        "status": "ok",
        "model": state.text.names[0],
        "version": __version__,
        "ready": state.core.model is not None,
    }
    if (problem := state.core_problem) is not None:
        return json_response(content | {"status": "core failed", "reason": problem}, 503)
    return json_response(content)


async def _health_as_vllm(state: ApiServerState) -> Response:
    """Answers vLLM's /health and /ping: no body, and 200 once requests are answered. vLLM listens only when it is
    ready.
    """
    is_up = state.core_problem is None and state.core.model is not None
    return Response(status_code=200 if is_up else 503)


async def _docs(path: str) -> Response:
    file = docs_file(path)
    headers = {name.decode(): value.decode() for name, value in file.headers}
    headers["content-length"] = str(len(file.body))

    async def pieces() -> AsyncIterator[bytes]:
        for piece in pieces_of(file.body):
            yield piece

    # A client that reads nothing is sent one piece, and not a copy of the file.
    return StreamingResponse(pieces(), headers=headers, media_type=file.media_type)


async def _nothing() -> Response:
    return Response(status_code=204)


async def _openapi() -> Response:
    return json_response(document())


async def _version() -> Response:
    return json_response(Version(__version__))


async def _load(state: ApiServerState) -> Response:
    """Answers vLLM's /load: the number of requests for text that are being answered."""
    return json_response(Load(state.in_flight))


async def _tokenizer_info(state: ApiServerState) -> Response:
    """Answers vLLM's /tokenizer_info: tokenizer_config.json, with the chat template if that is a file of its own."""
    assets = state.text.assets
    if assets is None:
        raise ApiError(404, "this server runs without a tokenizer (--skip-tokenizer-init)", code="no_tokenizer")
    info = read_json_object(assets.files.get("tokenizer_config.json", "{}").encode())
    if "chat_template.jinja" in assets.files:
        info["chat_template"] = assets.files["chat_template.jinja"]
    return json_response(info)


async def _ready(state: ApiServerState) -> Response:
    if state.core_problem is not None:
        return json_response({"status": "core failed"}, 503)
    if state.core.model is None:
        return json_response({"status": "loading"}, 503)
    if state.draining:
        return json_response({"status": "draining"}, 503, {launch.DRAINING_HEADER: "true"})
    model = state.core.model
    body = {"status": "ready", "role": state.role, "kv_transport": model.kv_transport}
    sizes = {
        "tensor_parallel_size": model.tensor_parallel_size,
        "pipeline_parallel_size": model.pipeline_parallel_size,
        "data_parallel_size": model.data_parallel_size,
    }
    start = {"weights": model.weights, "start_seconds": model.start_seconds} if model.start_seconds else {}
    return json_response(body | sizes | start)


async def _metrics(state: ApiServerState) -> Response:
    return Response(state.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _models(state: ApiServerState) -> Response:
    return json_response(ModelList("list", [_describe(state, name) for name in state.text.names]))


async def _model(state: ApiServerState, request: Request) -> Response:
    name = request.path_params["name"]
    state.check_model(name)
    return json_response(_describe(state, name))


def _describe(state: ApiServerState, name: str) -> Model:
    loaded, formats = state.core.model, state.text.formats
    max_model_len = None if loaded is None else loaded.max_model_len
    parsers = (formats.tool_call_parser, formats.reasoning_parser)
    impl = loaded.model_impl if loaded is not None and loaded.model_impl else UNSET
    return Model(name, "model", _CREATED, "mini-infer", state.text.names[0], max_model_len, *parsers, impl)


async def _start_drain(state: ApiServerState) -> Response:
    """Begins a drain, which only a new process ends."""
    state.start_drain()
    return await _drain_state(state)


async def _switch_role(state: ApiServerState, request: Request) -> Response:
    body = await state.read_json(request)
    role = read_json_object(body).get("role")
    if role not in get_args(launch.Role):
        raise ApiError(400, f"role is {role!r}: choose among {', '.join(get_args(launch.Role))}", param="role")
    if state.core.model is None:
        raise ApiError(503, "the model is still loading", code="loading")
    if role != "unified" and not state.core.model.kv_transport:
        message = f"role is {role!r}, and this engine moves no keys and values: start it with --transfer-port"
        raise ApiError(409, message, param="role", code="no_kv_transfer")
    state.switch_role(cast("launch.Role", role))
    return await _role(state)


async def _role(state: ApiServerState) -> Response:
    return json_response({"role": state.role, "running": max(state.in_flight, state.metrics.stats.running)})


async def _drain_state(state: ApiServerState) -> Response:
    return json_response({"draining": state.draining, "running": state.in_flight})


async def _prompt_assets(state: ApiServerState, request: Request) -> Response:
    assets = state.text.assets
    if assets is None:
        raise ApiError(404, "this server runs without a tokenizer (--skip-tokenizer-init)", code="no_tokenizer")
    etag = f'"{assets.revision}"'
    if etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers={"etag": etag})
    return json_response(assets, headers={"etag": etag})


async def _prefetch(state: ApiServerState, request: Request) -> Response:
    announced = announced_sessions(read_json_object(await state.read_json(request)))
    if state.core.model is None:
        raise ApiError(503, "the model is still loading", code="loading")
    state.core.prefetch(announced.request_ids, announced.ttl_s)
    return Response(status_code=204)


async def _kv_snapshot(state: ApiServerState) -> Response:
    if state.core.model is None:
        raise ApiError(503, "the model is still loading", code="loading")
    return Response(await state.core.snapshot(), media_type="application/msgpack")
