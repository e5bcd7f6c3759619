"""OpenAI's /v1/completions: its fields, their meaning, and the form of its answer."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from mini_infer_engine.api.dialects.base import GenerationSpec, OutputLimit
from mini_infer_engine.api.dialects.fields import MAX_CHOICES, GenerationFields, common_spec, parse_fields
from mini_infer_engine.api.dialects.neutral import BOTH, COMPLETION, Neutral
from mini_infer_engine.api.dialects.openai.logprobs import CompletionLogprobs, joined, prompt_logprobs
from mini_infer_engine.api.dialects.openai.shapes import OpenAIRenderer, encode_json
from mini_infer_engine.core.request import TokenLogprobs
from mini_infer_engine.text.detokenizer import Decoder
from mini_infer_engine.text.output_text import Delta, OutputText
from mini_infer_engine.text.tokenizing import ImageFiles, PromptLimits, Sliced, completion_ids
from mini_infer_engine.text.validation import MAX_LOGPROBS
from mini_infer_prompts.prompt import PromptEncoder, is_token_ids
from mini_infer_web.api_errors import ApiError
from mini_infer_web.body_fields import UnknownFields

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of max_tokens."""


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions."""

    neutral: ClassVar[Neutral] = BOTH | COMPLETION

    prompt: Any = None
    """A string, token ids, or a list of these; checked where it becomes token ids."""
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None

    @property
    def output_limit(self) -> OutputLimit:
        """The limit of each choice's tokens."""
        if self.max_tokens is None:
            return OutputLimit("max_tokens", DEFAULT_MAX_TOKENS, False)
        # An echo alone: the engine makes a token that nobody is told of.
        return OutputLimit("max_tokens", 1 if self.echo and self.max_tokens == 0 else self.max_tokens, True)


class CompletionDialect:
    """The `Dialect` of /v1/completions."""

    def parse(self, body: dict[str, Any], unknown: UnknownFields | None = None) -> GenerationSpec:
        """Parses the body, which has one prompt or several."""
        request = parse_fields(body, CompletionRequest, unknown)
        prompt = request.prompt
        are_several = isinstance(prompt, list) and not is_token_ids(prompt)

        def prompt_ids(
            encoder: PromptEncoder | None, limits: PromptLimits | None, images: ImageFiles | None
        ) -> Sliced[list[list[int]]]:
            return completion_ids(encoder, body, limits)

        spec = common_spec(
            request,
            prompt_ids=prompt_ids,
            prompt_param="prompt",
            num_prompts=max(1, len(prompt)) if are_several else 1,
            needs_text=not is_token_ids(prompt),
            output_limit=request.output_limit,
            num_logprobs=request.logprobs,
            copies=_copies(request),
        )
        if spec.copies > (request.n or 1):
            spec = _keeping_the_best(spec, request.n or 1)
        if not request.echo:
            return spec
        texts = [item if _is_sent_whole(item, request) else None for item in (prompt if are_several else [prompt])]
        sampling = dict(spec.sampling)
        if spec.beams is not None and request.logprobs is not None:
            message = "echo with logprobs has no meaning with use_beam_search = true: leave out one of them"
            raise ApiError(400, message, param="echo", code="unsupported_value")
        if request.logprobs is not None:
            counts = (request.logprobs, sampling.get("prompt_logprobs") or 0)
            sampling["prompt_logprobs"] = -1 if -1 in counts else max(counts)
        return replace(
            spec, echo=True, echo_alone=request.max_tokens == 0, prompt_texts=tuple(texts), sampling=sampling
        )

    def renderer(
        self, spec: GenerationSpec, request_id: str, model: str, decoder: Decoder | None
    ) -> "CompletionRenderer":
        """Returns the renderer of a completion."""
        return CompletionRenderer(spec, request_id, model, decoder)


def _is_sent_whole(prompt: str | list[int], request: CompletionRequest) -> bool:
    """True if the model sees the whole text of a prompt; else the echoed text is made of its token ids."""
    return isinstance(prompt, str) and request.truncate_prompt_tokens is None


def _copies(request: CompletionRequest) -> int:
    """Returns the number of texts to make of each prompt. Raises ApiError if `best_of` does not go with
    other fields.
    """
    copies, best_of = request.n or 1, request.best_of
    if best_of is None or best_of == copies:
        return copies
    why = ""
    if best_of < copies:
        why = f"is less than n = {copies}: ask for as many or more"
    elif request.stream:
        why = "is known at the end only: leave out stream"
    elif request.use_beam_search:
        why = "does not go with use_beam_search = true, whose choices are the best anyway"
    if why:
        raise ApiError(400, f"best_of = {best_of} {why}", param="best_of", code="invalid_value")
    return best_of


def _keeping_the_best(spec: GenerationSpec, keep: int) -> GenerationSpec:
    sampling = {"logprobs": 0, **spec.sampling}
    return replace(spec, keep=keep, sampling=sampling, hides_logprobs="logprobs" not in spec.sampling)


def _by_likelihood(reply: OutputText) -> float:
    """Returns the log probability a token, by which OpenAI ranks `best_of`."""
    return sum(position.logprob for position in reply.logprobs) / max(1, len(reply.logprobs))


class CompletionRenderer(OpenAIRenderer):
    """Renders text_completion, whole and in chunks of the same name."""

    id_prefix = "cmpl-"
    object_name = chunk_object_name = "text_completion"

    def __init__(self, spec: GenerationSpec, request_id: str, model: str, decoder: Decoder | None) -> None:
        super().__init__(spec, request_id, model, decoder)
        self._logprobs: list[CompletionLogprobs] = []
        """Log probabilities of each choice of a stream."""
        self._prompt_positions: dict[int, list[TokenLogprobs]] = {}
        """Log probabilities so far of prompts that are still to be echoed, by choice."""
        self._prompt_ids: list[Sequence[int]] = []
        self._made: Sequence[OutputText] = ()
        """All choices of a whole answer, those that are not sent included."""

    def whole(self, replies: Sequence[OutputText]) -> bytes:
        """Renders the answer, with the best choices of each prompt if the request has `best_of`. Usage counts all."""
        spec, self._made = self._spec, replies
        if spec.keep is None:
            return super().whole(replies)
        groups = [replies[start : start + spec.copies] for start in range(0, len(replies), spec.copies)]
        best = [sorted(group, key=_by_likelihood, reverse=True)[: spec.keep] for group in groups]
        return super().whole([reply for group in best for reply in group])

    def message(self, reply: OutputText) -> dict[str, Any]:
        """Returns the text, after its prompt if that is echoed; as in vLLM, the prompt's log probabilities are here."""
        text = "" if self._spec.echo_alone else reply.text
        found: dict[str, Any] = {"text": text, "prompt_logprobs": None, "prompt_token_ids": None}
        if self._requests_prompt_logprobs:
            found["prompt_logprobs"] = prompt_logprobs(reply.prompt_logprobs, self._decoder)
        return found

    @property
    def _requests_prompt_logprobs(self) -> bool:
        return self._spec.sampling.get("prompt_logprobs") is not None and not self._spec.echo

    def _choice(self, index: int, reply: OutputText) -> dict[str, Any]:
        choice = super()._choice(index, reply)
        if self._spec.echo:
            choice["text"] = self._prompt_text(index, reply.request.prompt_token_ids) + choice["text"]
        if self._returns_logprobs:
            logprobs, parts = self._logprobs_of(reply), list[dict[str, Any]]()
            if self._spec.echo:
                text = self._prompt_text(index, reply.request.prompt_token_ids)
                parts.append(logprobs.of_prompt(reply.prompt_logprobs, text))
            parts += [] if self._spec.echo_alone else [logprobs.of_output(reply.logprobs)]
            choice["logprobs"] = reduce(joined, parts)
        if self._spec.return_prompt_token_ids:
            choice["prompt_token_ids"] = reply.request.prompt_token_ids
        return choice

    def _logprobs_of(self, reply: OutputText) -> CompletionLogprobs:
        request = reply.request
        return CompletionLogprobs(
            self._names,
            request.prompt_token_ids,
            self._spec.resume_token_ids,
            skip_special_tokens=request.sampling.skip_special_tokens,
        )

    def whole_logprobs(self, reply: OutputText) -> dict[str, Any]:
        """Returns nothing: log probabilities are made in `_choice`, which knows the choice's place."""
        return {}

    def delta_logprobs(self, delta: Delta) -> dict[str, Any]:
        """Returns the log probabilities of a delta's tokens in a completion's shape."""
        return self._logprobs[delta.index].of_output(delta.logprobs)

    def usage(self, replies: Sequence[OutputText]) -> dict[str, Any]:
        """Returns the usage; an echo without text has no completion tokens."""
        found = super().usage(self._made or replies)
        if self._spec.echo_alone:
            found |= {"completion_tokens": 0, "total_tokens": found["prompt_tokens"]}
        return found

    def text_delta(self, text: str) -> bytes:
        """Returns a piece of the text."""
        return b'"text":' + encode_json(text)

    def begin(self, replies: Sequence[OutputText]) -> bytes:
        """Prepares log probabilities, prompt ids and echoes of a stream."""
        super().begin(replies)
        if self._returns_logprobs:
            self._logprobs = [self._logprobs_of(reply) for reply in replies]
        if self._spec.return_prompt_token_ids and not self._spec.resume_token_ids:
            prompts = [encode_json(reply.request.prompt_token_ids) for reply in replies]
            self.once_in_choice = {index: b',"prompt_token_ids":' + ids for index, ids in enumerate(prompts)}
        if self._spec.echo:
            self._prompt_ids = [reply.request.prompt_token_ids for reply in replies]
            self._prompt_positions = {index: [] for index in range(len(replies))}
        return b""

    def event(self, delta: Delta) -> bytes:
        """Renders a delta. A choice's prompt is sent with its first token: by then its log probabilities are known."""
        positions = self._prompt_positions.get(delta.index)
        if positions is None:
            return super().event(self._without_echo(delta))
        positions += delta.prompt_logprobs
        if not delta.token_ids and delta.finish_reason is None:
            return b""
        del self._prompt_positions[delta.index]
        prompt = self._prompt_ids[delta.index]
        text, logprobs = self._prompt_text(delta.index, prompt), b"null"
        if self._returns_logprobs:
            logprobs = encode_json(self._logprobs[delta.index].of_prompt(positions, text))
        echoed = self.chunk(Delta("", [], delta.index), self.text_delta(text), logprobs)
        return echoed + super().event(self._without_echo(delta))

    def _without_echo(self, delta: Delta) -> Delta:
        if not self._spec.echo_alone:
            return delta
        return Delta("", [], delta.index, delta.finish_reason, delta.stop_reason)

    def _prompt_text(self, index: int, token_ids: Sequence[int]) -> str:
        text = self._spec.prompt_texts[index // self._spec.returned_copies]
        if text is not None or self._decoder is None:
            return text or ""
        return self._decoder.decode(list(token_ids), skip_special_tokens=False)
