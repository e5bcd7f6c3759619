"""Serves one request for text in any dialect: from its body to a generation, and from that to an answer or a stream."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mini_infer_contract.launch import KV_FALLBACK_HEADER
from mini_infer_contract.peer_auth import PEER_HEADER
from mini_infer_engine.api.access_log import access_log_fields
from mini_infer_engine.api.dialects.base import Dialect, GenerationSpec, Renderer, StreamRenderer
from mini_infer_engine.api.dialects.openai.shapes import usage
from mini_infer_engine.api.generation import Generation
from mini_infer_engine.api.http import client_of, error_response, json_response, request_id
from mini_infer_engine.api.ignored_fields import ignored_header
from mini_infer_engine.api.images import image_files, image_inputs
from mini_infer_engine.api.key_check import GRANT
from mini_infer_engine.api.kv_lease import kv_lease
from mini_infer_engine.api.kv_source import kv_source
from mini_infer_engine.api.kv_trust import trusts_sender
from mini_infer_engine.api.latency_targets import latency_targets
from mini_infer_engine.api.output_grammar import output_grammar
from mini_infer_engine.api.state import ApiServerState
from mini_infer_engine.config.model.generation_defaults import GenerationDefaults
from mini_infer_engine.config.options.server_options import ServerOptions
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core_process.messages import ModelInfo
from mini_infer_engine.parsing.base import OutputParser
from mini_infer_engine.parsing.parser import FormatParser, check_parsing, markers
from mini_infer_engine.text.bad_words import with_bad_words
from mini_infer_engine.text.detokenizer import Decoder
from mini_infer_engine.text.pooled_prompts import check_task
from mini_infer_engine.text.pooled_result import check_dimensions
from mini_infer_engine.text.text_model import LONG_BYTES, TextModel
from mini_infer_engine.text.tokenizing import PromptLimits, whole
from mini_infer_engine.text.truncation import truncated
from mini_infer_engine.text.validation import (
    ParameterError,
    check_output_fits,
    check_prompt,
    check_resumed,
    check_sampling,
)
from mini_infer_prompts.prompt import PromptEncoder
from mini_infer_web.api_errors import ApiError, read_json_object
from mini_infer_web.api_keys import SALTED_BY_KEY, KeyGrant, salted
from mini_infer_web.asgi import KEEPALIVE_COMMENT, UNBUFFERED_STREAM_HEADERS
from mini_infer_web.request_timeout import request_timeout_s, timed_out

_MANY_REPLIES = 32
_MAX_BAD_WORDS, _LONGEST_BAD_WORD = 1000, 200


@dataclass(frozen=True, slots=True)
class Work:
    """A request that has been accepted."""

    generation: Generation
    renderer: Renderer
    model: str
    """Model name in the answer."""
    streams: bool
    in_clients_words: Callable[[ApiError], ApiError]
    ignored_fields: Sequence[str] = ()
    """Names of fields of the request that were ignored."""


class GenerationResponse(Response):
    """Reads a request, runs it for as long as its client listens, and answers whole or in events."""

    def __init__(self, state: ApiServerState, http_request: HttpRequest, dialect: Dialect) -> None:
        self.background = None
        self.status_code = 200
        self._state = state
        self._request = http_request
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers an ASGI request. It counts from here on, its body not read yet: a drain waits for all that have
        begun.
        """
        arrived_s = time.monotonic()
        with self._state.counted(), ExitStack() as stack:
            try:
                timeout_s = request_timeout_s(scope["headers"], self._state.options.request_timeout_s)
                work = await self._accept(stack, arrived_s)
            except ApiError as error:
                await error_response(error, scope)(scope, receive, send)
                return
            try:
                with _time_limit(work.generation, timeout_s, timeout_s - (time.monotonic() - arrived_s)):
                    await self._run(work, scope, receive, send)
            finally:
                access_log_fields(scope).update(_access_log_fields(work))

    async def _accept(self, stack: ExitStack, arrived_s: float) -> Work:
        """Accepts the request. Raises ApiError if it cannot be served. `stack` keeps its place in line."""
        state = self._state
        raw = await state.read_json(self._request)
        with state.admission.body(len(raw)):
            body, unknown = read_json_object(raw), state.unknown_fields()
            spec = _with_options(self._dialect.parse(body, unknown), state.options)
            spec = of_key(spec, self._request.scope.get("state", {}).get(GRANT), state.options)
            state.ignored_fields.note(unknown.names)
            try:
                if spec.parsing is not None:
                    check_parsing(state.text.formats, spec.parsing)
                model = state.admit(spec.model)
                stack.enter_context(state.admission.choices(spec.num_prompts * spec.copies))
                prompts, sampling = await checked(
                    state, model, spec, len(raw), client_of(self._request, state.peer_secret)
                )
                images = await image_inputs(state, prompts, spec.copies, stack)
                headers = self._request.headers
                is_trusted = trusts_sender(state.options.kv_transfer_trust, state.peer_secret, headers.get(PEER_HEADER))
                source = kv_source(headers, spec.kv_transfer_params, is_trusted=is_trusted)
                lease = kv_lease(headers, spec.kv_hints)
                targets = latency_targets(headers, spec.target_fields, state.default_targets, arrived_s)
            except ParameterError as error:
                raise spec.in_clients_words(bad_parameter(error)) from None
            except ApiError as error:
                raise spec.in_clients_words(error) from None
        chosen_id = spec.request_id or request_id(self._request)
        requests = state.make_requests(chosen_id, prompts, spec, sampling, source, targets, images, lease)
        streams_every_step = spec.streams_every_step or state.text.decoder is None
        model_name = spec.model or state.text.names[0]
        decoder, make_parser = _reading(state.text, spec)
        return Work(
            Generation(
                requests,
                decoder,
                state.metrics,
                streams=spec.streams,
                streams_every_step=streams_every_step,
                make_parser=make_parser,
                copies=spec.copies,
            ),
            self._dialect.renderer(spec, chosen_id, model_name, state.text.decoder),
            model_name,
            spec.streams,
            spec.in_clients_words,
            unknown.names,
        )

    async def _run(self, work: Work, scope: Scope, receive: Receive, send: Send) -> None:
        core, generation = self._state.core, work.generation
        watcher = asyncio.create_task(_cancel_on_disconnect(receive, generation))
        try:
            core.submit(generation)
            if work.streams:
                await _stream(work, scope, receive, send, self._state.options.sse_keepalive_s)
            else:
                await _whole(work, scope, receive, send)
        except OSError:
            pass  # the client left while something was being sent
        finally:
            core.leave(generation)
            generation.count_unfinished()
            watcher.cancel()


def of_key(spec: GenerationSpec, grant: KeyGrant | None, options: ServerOptions) -> GenerationSpec:
    """Applies the priority and the cache salt that the request's key allows; a gateway has salted its
    clients' already.
    """
    lowest = options.max_priority if grant is None or grant.max_priority is None else grant.max_priority
    if lowest is not None and spec.priority < lowest:
        spec = replace(spec, priority=lowest)
    if grant is None or not options.cache_salt_by_key or spec.cache_salt.startswith(SALTED_BY_KEY):
        return spec
    return replace(spec, cache_salt=salted(grant, spec.cache_salt))


def _with_options(spec: GenerationSpec, options: ServerOptions) -> GenerationSpec:
    """Adds the effects of the server's flags to the spec."""
    if options.enable_per_request_metrics:
        spec = replace(spec, returns_timings=True)
    if options.return_tokens_as_token_ids:
        spec = replace(spec, tokens_as_ids=True)
    if options.enable_force_include_usage and spec.streams:
        spec = replace(spec, include_usage=True, continuous_usage=True)
    return spec


def _reading(text: TextModel, spec: GenerationSpec) -> tuple[Decoder | None, Callable[[Request], OutputParser] | None]:
    """Returns the decoder of the output, and the function that makes its parser; None if it is not parsed."""
    if spec.parsing is None or text.decoder is None:
        return text.decoder, None
    decoder = text.decoder_showing(markers(text.formats, spec.parsing))
    parsing = spec.parsing
    return decoder, lambda of: FormatParser(text.formats, parsing, text.prompt_end(of.prompt_token_ids))


def _access_log_fields(work: Work) -> dict[str, Any]:
    """Returns the facts for the request's line in the log."""
    counts = usage(work.generation.replies)
    fields = {
        "model": work.model,
        "prompt_tokens": counts["prompt_tokens"],
        "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": counts["completion_tokens"],
        "finish_reason": ",".join(reply.finish_reason or "abort" for reply in work.generation.replies),
    }
    if work.generation.first_token_s is not None:
        fields["first_token_s"] = round(work.generation.first_token_s, 6)
    if work.generation.error is not None:
        fields["error"] = work.in_clients_words(work.generation.error).message
    return fields


def bad_parameter(error: ParameterError) -> ApiError:
    """Returns the error for a value out of its range."""
    return ApiError(400, str(error), param=error.path, code=error.code)


async def checked(
    state: ApiServerState, model: ModelInfo, spec: GenerationSpec, size_bytes: int, client: str = ""
) -> tuple[list[list[int]], SamplingParams]:
    """Returns prompts and parameters that the engine can serve. Raises ApiError or ParameterError if it cannot.

    `size_bytes`: of the request's body; `client`: the name by which limits on one client count.
    """
    text, limit = state.text, spec.output_limit
    sampling = sampling_params(spec, text.defaults)
    if sampling.bad_words:
        sampling = await text.in_thread(partial(_with_bad_words, sampling, text.encoder))
    check_sampling(sampling, model.vocab_size, text.encoder is not None, limit.param)
    if sampling.max_tokens is not None and not limit.is_requested:
        # Nobody is told that it is too many, and the core reads numbers of 64 bits.
        sampling = msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, model.max_model_len))
    check_task(model.pooler, spec.task)
    check_dimensions(model.pooler, spec.dimensions)
    output_room = 1 if spec.pooled is None else model.output_room
    limits = text.limits(model.max_model_len, output_room) if spec.truncation is None else None
    with state.admission.fetched() as reserve:
        prompts = await _prompts(state, model, spec, size_bytes, limits, reserve)
    max_tokens = limit.max_tokens if limit.is_requested else None
    prompts = truncated(prompts, spec.truncation, model.max_model_len, max_tokens or output_room)
    for index, prompt in enumerate(prompts):
        param = spec.prompt_param if spec.pooled is None else spec.pooled.paths[index]
        check_prompt(prompt, model.max_model_len, model.vocab_size, param, output_room=output_room)
        if spec.resume_token_ids:
            check_resumed(len(prompt), spec.resume_token_ids, model.max_model_len, model.vocab_size)
        if limit.is_requested and limit.max_tokens is not None:
            check_output_fits(len(prompt), limit.max_tokens, model.max_model_len, limit.param)
    if (request := output_grammar(spec, text, prompts[0])) is not None:
        if spec.beams is not None:
            param = request.param
            raise ParameterError(param, f"{param} does not go with use_beam_search = true: leave out one of them")
        sampling = msgspec.structs.replace(sampling, grammar=await text.grammars.build_in_thread(request, client))
    return prompts, sampling


async def _prompts(
    state: ApiServerState,
    model: ModelInfo,
    spec: GenerationSpec,
    size_bytes: int,
    limits: PromptLimits | None,
    reserve: Callable[[int], None],
) -> list[list[int]]:
    """Returns the token ids of each prompt, with their images as `ImagePrompt`s."""
    text = state.text
    files = await image_files(text, model, spec.prompt_param, spec.images, reserve)
    if files and spec.truncation is not None:
        message = "truncate_prompt_tokens does not go with images, which cannot be cut: leave it out"
        raise ParameterError("truncate_prompt_tokens", message)
    job = spec.prompt_ids(text.encoder, limits, files)
    # A few token ids are read here: the way through a thread would take longer.
    is_long = size_bytes >= LONG_BYTES or (spec.needs_text and text.encoder is not None)
    return await text.in_slices(job, size_bytes) if is_long else whole(job)


def _with_bad_words(sampling: SamplingParams, encoder: PromptEncoder | None) -> SamplingParams:
    """Adds the token ids of bad words. Raises ParameterError if they are too many, or there is no tokenizer."""
    if len(sampling.bad_words) > _MAX_BAD_WORDS or max(map(len, sampling.bad_words)) > _LONGEST_BAD_WORD:
        message = f"bad_words may have {_MAX_BAD_WORDS} words of at most {_LONGEST_BAD_WORD} characters"
        raise ParameterError("bad_words", message)
    try:
        return with_bad_words(sampling, None if encoder is None else partial(encoder.encode, add_special_tokens=False))
    except ValueError as error:
        raise ParameterError("bad_words", str(error)) from None


def sampling_params(spec: GenerationSpec, defaults: GenerationDefaults) -> SamplingParams:
    """Returns the client's values, else the model's, else OpenAI's."""
    max_tokens = defaults.output_tokens(spec.output_limit.max_tokens)
    return SamplingParams(**{**defaults.sampling, **spec.sampling, "max_tokens": max_tokens})


async def _whole(work: Work, scope: Scope, receive: Receive, send: Send) -> None:
    generation = work.generation
    await generation.finished()
    if generation.error is not None:
        await error_response(work.in_clients_words(generation.error), scope)(scope, receive, send)
    elif not generation.cancelled:
        replies = generation.replies
        # Two thousand embeddings take a fifth of a second to write.
        many = len(replies) > _MANY_REPLIES
        content = await asyncio.to_thread(work.renderer.whole, replies) if many else work.renderer.whole(replies)
        await json_response(content, headers=_response_headers(work))(scope, receive, send)


def _response_headers(work: Work) -> dict[str, str]:
    """Returns headers of the answer: why KV transfer fell back, for the gateway, which removes it; and the ignored
    fields, for all.
    """
    fallback = work.generation.kv_fallback
    return ({KV_FALLBACK_HEADER: fallback} if fallback else {}) | ignored_header(work.ignored_fields)


def _stream_headers(work: Work) -> list[tuple[bytes, bytes]]:
    own = [(name.encode(), value.encode()) for name, value in _response_headers(work).items()]
    return UNBUFFERED_STREAM_HEADERS + own


@contextmanager
def _time_limit(generation: Generation, timeout_s: float, left_s: float) -> Iterator[None]:
    """Ends the generation with a 408 when no time is left."""
    if timeout_s == math.inf:
        yield
        return
    timer = asyncio.get_running_loop().call_later(max(0.0, left_s), generation.fail, timed_out(timeout_s))
    try:
        yield
    finally:
        timer.cancel()


async def _stream(work: Work, scope: Scope, receive: Receive, send: Send, keepalive_s: float) -> None:
    # A dialect that takes `stream` renders streams.
    generation, renderer = work.generation, cast("StreamRenderer", work.renderer)
    begun = False
    # Nothing is sent before the first token: until then an error still has its own status, and can be retried. But
    # proxies cut what is silent for long.
    first = asyncio.create_task(generation.deltas())
    try:
        while not (await asyncio.wait({first}, timeout=keepalive_s or None))[0]:
            if not begun:
                begun = True
                await send({"type": "http.response.start", "status": 200, "headers": _stream_headers(work)})
            await send({"type": "http.response.body", "body": KEEPALIVE_COMMENT, "more_body": True})
    finally:
        first.cancel()
    deltas = first.result()
    if generation.error is not None and not deltas and not begun:
        await error_response(work.in_clients_words(generation.error), scope)(scope, receive, send)
        return
    if not begun:
        await send({"type": "http.response.start", "status": 200, "headers": _stream_headers(work)})
    if not deltas and generation.error is not None:
        await send({"type": "http.response.body", "body": renderer.broken(work.in_clients_words(generation.error))})
        return
    data = renderer.begin(generation.replies)
    while deltas:
        if data := data + renderer.render(deltas):
            await send({"type": "http.response.body", "body": data, "more_body": True})
        data = b""
        deltas = await generation.deltas()
    error = generation.error
    end = renderer.end(generation.replies) if error is None else renderer.broken(work.in_clients_words(error))
    await send({"type": "http.response.body", "body": end})


async def _cancel_on_disconnect(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.cancel()
