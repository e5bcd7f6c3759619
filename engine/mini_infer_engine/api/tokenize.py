"""/tokenize and /detokenize, as vLLM has them, and /v1/messages/count_tokens, as Anthropic has it."""

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mini_infer_apis.dialects.anthropic import chat_of, client_paths
from mini_infer_apis.dialects.anthropic_request import CountTokensRequest, parse_request
from mini_infer_engine.api.answers import Detokenized, MessageTokensCount, Tokenized
from mini_infer_engine.api.dialects.fields import Body, parse_fields
from mini_infer_engine.api.dialects.messages import check_messages
from mini_infer_engine.api.dialects.openai.chat import ChatDialect
from mini_infer_engine.api.http import json_response
from mini_infer_engine.api.images import image_files
from mini_infer_engine.api.state import ApiServerState
from mini_infer_engine.text.tokenizing import ImageFiles, Sliced, chat_ids, text_ids, text_of_ids
from mini_infer_prompts.image_sources import image_sources
from mini_infer_prompts.prompt import PromptEncoder, PromptText
from mini_infer_web.api_errors import ApiError, read_json_object


class TokenizeRequest(Body):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    documents: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


async def tokenize(state: ApiServerState, http_request: HttpRequest) -> Response:
    """Answers with the token ids of a text or of messages, however many they are."""
    raw = await state.read_json(http_request)
    with state.admission.body(len(raw)):
        body = read_json_object(raw)
        request = parse_fields(body, TokenizeRequest, state.unknown_fields())
        state.check_model(request.model)
        encoder = _encoder(state)
        with state.admission.fetched() as reserve:
            sources = [image_sources(request.messages)]
            images = await image_files(state.text, state.core.model, "messages", sources, reserve)
            ids = await state.text.in_slices(_ids(encoder, request, body, images), len(raw))
    strings = [encoder.tokenizer.id_to_token(token_id) for token_id in ids] if request.return_token_strs else None
    max_model_len = state.core.model.max_model_len if state.core.model else None
    return json_response(Tokenized(len(ids), ids, strings, max_model_len))


def _ids(
    encoder: PromptEncoder, request: TokenizeRequest, body: dict[str, Any], images: ImageFiles | None
) -> Sliced[list[int]]:
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "send either prompt or messages", param="prompt")
    if request.prompt is not None:
        return text_ids(encoder, PromptText(request.prompt, request.add_special_tokens is not False), ("prompt",))
    check_messages(request.messages or ())
    return chat_ids(encoder, body, images=images)


async def count_tokens(state: ApiServerState, http_request: HttpRequest) -> Response:
    """Answers with the number of tokens of a message's prompt, however many they are."""
    raw = await state.read_json(http_request)
    with state.admission.body(len(raw)):
        request = parse_request(read_json_object(raw), CountTokensRequest, state.unknown_fields())
        chat = chat_of(request)
        try:
            state.check_model(ChatDialect().parse(chat).model)
            encoder = _encoder(state)
            with state.admission.fetched() as reserve:
                sources = [image_sources(chat["messages"])]
                images = await image_files(state.text, state.core.model, "messages", sources, reserve)
                ids = await state.text.in_slices(chat_ids(encoder, chat, images=images), len(raw))
        except ApiError as error:
            raise error.renamed(client_paths(request, chat)) from None
    return json_response(MessageTokensCount(len(ids)))


async def detokenize(state: ApiServerState, http_request: HttpRequest) -> Response:
    """Answers with the text of token ids, special tokens shown, as vLLM does."""
    raw = await state.read_json(http_request)
    with state.admission.body(len(raw)):
        request = parse_fields(read_json_object(raw), DetokenizeRequest, state.unknown_fields())
        state.check_model(request.model)
        text = await state.text.in_slices(text_of_ids(_encoder(state).tokenizer, request.tokens), len(raw))
    return json_response(Detokenized(text))


def _encoder(state: ApiServerState) -> PromptEncoder:
    if state.text.encoder is None:
        raise ApiError(400, "this server runs without a tokenizer (--skip-tokenizer-init)", code="no_tokenizer")
    return state.text.encoder
