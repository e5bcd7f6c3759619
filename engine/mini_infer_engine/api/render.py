"""vLLM's /v1/chat/completions/render and /v1/completions/render: a request as it is before anything is generated.

The answer has the fields of vLLM 0.26's `GenerateRequest`, and the prompt's text.
"""

from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mini_infer_engine.api.answers import Rendered
from mini_infer_engine.api.dialects.base import Dialect, GenerationSpec
from mini_infer_engine.api.dialects.openai.chat import ChatDialect, ChatRenderer
from mini_infer_engine.api.dialects.openai.completions import CompletionDialect, CompletionRenderer
from mini_infer_engine.api.generate import bad_parameter, checked
from mini_infer_engine.api.http import client_of, json_response, request_id
from mini_infer_engine.api.state import ApiServerState
from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.text.text_model import TextModel
from mini_infer_engine.text.validation import ParameterError
from mini_infer_web.api_errors import read_json_object

_OF_THE_TEXT_SIDE = frozenset(("bad_words_token_ids", "grammar", "detokenize"))
"""Sampling parameters that are made of others."""


async def render_chat(state: ApiServerState, http_request: HttpRequest) -> Response:
    """Answers with the one prompt of a chat."""
    (rendered,) = await _rendered(state, http_request, ChatDialect(), ChatRenderer.id_prefix)
    return json_response(rendered)


async def render_completion(state: ApiServerState, http_request: HttpRequest) -> Response:
    """Answers with a list: each prompt of a completion."""
    return json_response(await _rendered(state, http_request, CompletionDialect(), CompletionRenderer.id_prefix))


async def _rendered(
    state: ApiServerState, http_request: HttpRequest, dialect: Dialect, id_prefix: str
) -> list[Rendered]:
    raw = await state.read_json(http_request)
    with state.admission.body(len(raw)):
        spec = dialect.parse(read_json_object(raw), state.unknown_fields())
        model = state.admit(spec.model)
        try:
            prompts, sampling = await checked(state, model, spec, len(raw), client_of(http_request, state.peer_secret))
        except ParameterError as error:
            raise bad_parameter(error) from None
    streamed = {"include_usage": spec.include_usage, "continuous_usage_stats": spec.continuous_usage}
    return [
        Rendered(
            request_id=id_prefix + request_id(http_request),
            model=spec.model or state.text.names[0],
            prompt=await _text(state.text, ids),
            token_ids=ids,
            sampling_params=_sampling(sampling, spec, model.max_model_len - len(ids)),
            stream=spec.streams,
            stream_options=streamed if spec.streams else None,
            cache_salt=spec.cache_salt or None,
            priority=spec.priority,
            assistant_tokens_mask=None,
            token_offsets=None,
            features=None,
            kv_transfer_params=None,
            ec_transfer_params=None,
        )
        for ids in prompts
    ]


async def _text(text: TextModel, token_ids: list[int]) -> str | None:
    """Returns the text of token ids with special tokens shown; None if there is no tokenizer."""
    encoder = text.encoder
    if encoder is None:
        return None
    return await text.in_thread(lambda: encoder.decode(token_ids, skip_special_tokens=False))


def _sampling(sampling: SamplingParams, spec: GenerationSpec, max_new_tokens: int) -> dict[str, Any]:
    """Returns every parameter, defaults included. `max_new_tokens`: tokens that the context has after the prompt."""
    values = {name: getattr(sampling, name) for name in sampling.__struct_fields__ if name not in _OF_THE_TEXT_SIDE}
    built: dict[str, Any] = msgspec.to_builtins(values, str_keys=True)
    return built | {"n": spec.copies, "max_tokens": min(max_new_tokens, sampling.max_tokens or max_new_tokens)}
