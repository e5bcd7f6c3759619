"""The offline API, with vLLM's names: prompts in, finished texts out, the engine in this process. No HTTP.

With `data_parallel_size` above 1 the engines are processes (data_parallel.offline).
"""

import gc
import itertools
import weakref
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from tqdm import tqdm

from mini_infer_contract.api_errors import ApiError
from mini_infer_contract.prompt import chat_prompt_ids
from mini_infer_engine.config.model_path import resolve_model
from mini_infer_engine.config.settings import EngineSettings
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import Request, SamplingParams, TokenLogprobs
from mini_infer_engine.core_process.build import build_engine
from mini_infer_engine.data_parallel.offline import OfflineEngines
from mini_infer_engine.dry.dry_run import DryRun
from mini_infer_engine.dry.vocabulary import DRY_MODEL
from mini_infer_engine.offline_beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence, Logprob
from mini_infer_engine.structured.params import of_structured_outputs
from mini_infer_engine.text.bad_words import with_bad_words
from mini_infer_engine.text.detokenizer import Decoder
from mini_infer_engine.text.output_text import OutputText
from mini_infer_engine.text.text_model import TextModel
from mini_infer_engine.text.validation import ParameterError, check_prompt, check_sampling
from mini_infer_engine.vllm_keywords import to_own_names

Prompt = str | Mapping[str, Any]
"""A text, {"prompt": text} or {"prompt_token_ids": ids}."""
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One text that was made."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    cumulative_logprob: float | None = None
    """The sum over its tokens; None where no log probabilities were asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Of each token, and at its position of the most likely ones, by token id."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What became of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """The same of the prompt; None for its first token, of which nothing is known."""


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of one prompt."""

    embedding: list[float]
    """Of length 1."""


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """What became of one prompt that was to be embedded."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool
    num_cached_tokens: int


class _Reply(OutputText):
    """What becomes of one request."""

    def __init__(self, request: Request, decoder: Decoder | None) -> None:
        super().__init__(request, decoder)
        self.logprobs_by_token: list[dict[int, Logprob]] = []
        """Of each output token."""


class LLM:
    """A model and its engine. Not thread-safe."""

    def __init__(self, model: str, **settings: Any) -> None:
        """Load `model`; keywords are EngineSettings' fields, and vLLM's others at values that ask for nothing.

        ValueError: model or settings are at fault, and why. TypeError: there is no such keyword.
        """
        self.settings = _settings(model, settings)
        dry_run = DryRun() if model == DRY_MODEL else None
        weights = self.settings.load_format != "dummy"
        directory = None if dry_run else resolve_model(model, self.settings.revision, weights=weights)
        options = self.settings
        self._text = TextModel.load((model,), directory, options.skip_tokenizer_init, options.generation_config)
        self._engine: Engine | OfflineEngines
        if self.settings.data_parallel_size > 1:
            self._engine = OfflineEngines(self.settings, dry_run)
            self.model_info = self._engine.model
        else:
            built = build_engine(self.settings, dry_run, record_events=False)
            self._engine, self.model_info = built.engine, built.model
        self._ids = itertools.count()
        self._decoded_tokens: dict[int, str] = {}
        """Those of which log probabilities were told; as many as the vocabulary has at most."""
        # What is here now stays: full collections, a tenth of a second each, need not walk it while requests run. When
        # this object goes, they walk again, and find the cycles that hold the weights.
        gc.collect()
        gc.freeze()
        weakref.finalize(self, gc.unfreeze)

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own values where its generation_config.json has some."""
        return SamplingParams(**self._text.defaults.sampling)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One output for each prompt, in order. Parameters are one for all, or one for each.

        Everything is checked before anything runs: a ValueError names what is wrong and leaves the engine as it was.
        """
        listed = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        return self._run(
            [self._tokens(index, prompt) for index, prompt in enumerate(listed)], sampling_params, use_tqdm
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """One output for each conversation: a list of messages, or a list of such lists."""
        encoder = self._text.encoder
        if encoder is None:
            raise ValueError("chat needs a tokenizer, and this LLM has skip_tokenizer_init=True: use generate with ids")
        conversations: list[Any] = list(messages)
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        options = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
        }
        rendered: list[tuple[str | None, list[int]]] = []
        for index, conversation in enumerate(conversations):
            try:
                token_ids = chat_prompt_ids(encoder, options | {"messages": list(conversation)})
            except ApiError as error:
                raise ValueError(f"conversation {index}: {error.message}") from None
            rendered.append((encoder.decode(token_ids, skip_special_tokens=False), token_ids))
        return self._run(rendered, sampling_params, use_tqdm)

    def _tokens(self, index: int, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text and token ids of one prompt."""
        text = prompt if isinstance(prompt, str) else prompt.get("prompt")
        if not isinstance(prompt, str) and prompt.get("prompt_token_ids") is not None:
            return text, list(prompt["prompt_token_ids"])
        if not isinstance(text, str):
            raise ValueError(f'prompt {index} is neither a string nor has it "prompt" or "prompt_token_ids"')
        if self._text.encoder is None:
            raise ValueError(
                f"prompt {index} is text, and this LLM has skip_tokenizer_init=True: give prompt_token_ids"
            )
        return text, self._text.encoder.encode(text, add_special_tokens=True)

    def _run(
        self,
        prompts: list[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = self._params_for(len(prompts), sampling_params)
        packed = [_packed(token_ids) for _, token_ids in prompts]
        params = [self._with_grammar(index, self._with_bad_words(index, chosen)) for index, chosen in enumerate(params)]
        for index, (token_ids, chosen) in enumerate(zip(packed, params, strict=True)):
            self._check(index, token_ids, chosen)
        requests = [
            _request(str(next(self._ids)), token_ids, chosen) for token_ids, chosen in zip(packed, params, strict=True)
        ]
        replies = self._replies(requests, use_tqdm)
        return [self._output(reply, *prompt) for reply, prompt in zip(replies, prompts, strict=True)]

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The `beam_width` most likely continuations of each prompt, the best first.

        ValueError: a prompt or a parameter is at fault, or the KV cache cannot hold so many beams.
        """
        listed = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        searches: list[list[Request]] = []
        for index, prompt in enumerate(listed):
            token_ids = _packed(self._tokens(index, prompt)[1])
            self._check(index, token_ids, params.sampling())
            searches.append(params.requests(token_ids, [str(next(self._ids)) for _ in range(params.beam_width)]))
        requests = [request for search in searches for request in search]
        replies = iter(self._replies(requests, use_tqdm))
        return [BeamSearchOutput([self._beam(next(replies)) for _ in search]) for search in searches]

    def embed(self, prompts: Prompt | Sequence[Prompt], use_tqdm: bool = True) -> list[EmbeddingRequestOutput]:
        """The hidden state of each prompt's last token, L2-normalised; for models that are trained to embed so.

        ValueError: a prompt is at fault.
        """
        listed = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        requests = []
        for index, prompt in enumerate(listed):
            token_ids = _packed(self._tokens(index, prompt)[1])
            self._check(index, token_ids, sampling)
            name = str(next(self._ids))
            requests.append(Request(request_id=name, prompt_token_ids=token_ids, sampling=sampling, embeds=True))
        return [
            EmbeddingRequestOutput(
                reply.request.request_id,
                EmbeddingOutput(array("f", reply.embedding).tolist()),
                list(reply.request.prompt_token_ids),
                True,
                reply.num_cached_tokens,
            )
            for reply in self._replies(requests, use_tqdm)
        ]

    def _beam(self, reply: _Reply) -> BeamSearchSequence:
        assert reply.cumulative_logprob is not None
        assert reply.beam_score is not None
        tokens = [*reply.request.prompt_token_ids, *reply.token_ids]
        logprobs = reply.logprobs_by_token
        encoder = self._text.encoder
        text = None if encoder is None else encoder.decode(tokens, skip_special_tokens=True)
        cumulative, score = reply.cumulative_logprob, reply.beam_score
        return BeamSearchSequence(tokens, logprobs, cumulative, score, text, reply.finish_reason, reply.stop_reason)

    def _replies(self, requests: Sequence[Request], use_tqdm: bool) -> list[_Reply]:
        """What became of each. RuntimeError: a pass failed. ValueError: the engine refuses one of them."""
        replies = [_Reply(request, self._text.decoder) for request in requests]
        waiting = {reply.request.request_id: reply for reply in replies}
        try:
            for request in requests:
                if request.leads:
                    self._engine.add(request)
            finished = self._finished(waiting)
            for _ in tqdm(finished, "prompts", len(replies), unit="prompt") if use_tqdm else finished:
                pass
        finally:
            for request_id in waiting:
                self._engine.abort(request_id)  # after Ctrl-C or an error: the next call finds an idle engine
        return replies

    def _output(self, reply: _Reply, prompt: str | None, prompt_token_ids: list[int]) -> RequestOutput:
        request, told = reply.request, None
        if request.sampling.prompt_logprobs is not None:
            told = [None, *map(self._by_token, reply.prompt_logprobs)]
        completion = CompletionOutput(0, reply.text, reply.token_ids, reply.finish_reason, reply.stop_reason)
        if request.sampling.logprobs is not None:
            total = sum(position.logprob for position in reply.logprobs)
            completion = replace(completion, cumulative_logprob=total, logprobs=reply.logprobs_by_token)
        cached = reply.num_cached_tokens
        return RequestOutput(request.request_id, prompt, prompt_token_ids, [completion], True, cached, told)

    def _by_token(self, position: TokenLogprobs, *, are_named: bool = False) -> dict[int, Logprob]:
        """The position's own token, then the most likely ones in order, or those that were named."""
        own = position.token_id
        by_token = {own: Logprob(position.logprob, position.rank, self._decoded(own))}
        tops = zip(position.top_token_ids, position.top_logprobs, strict=True)
        for rank, (token_id, logprob) in enumerate(tops, start=1):
            if token_id != own:
                by_token[token_id] = Logprob(logprob, None if are_named else rank, self._decoded(token_id))
        return by_token

    def _decoded(self, token_id: int) -> str | None:
        encoder = self._text.encoder
        if encoder is None:
            return None
        text = self._decoded_tokens.get(token_id)
        if text is None:
            text = self._decoded_tokens[token_id] = encoder.decode([token_id], skip_special_tokens=False)
        return text

    def _finished(self, waiting: dict[str, _Reply]) -> Iterator[_Reply]:
        """Step until nobody waits; yields replies, and takes them out, as they finish."""
        while waiting:
            for output in self._engine.step():
                reply = waiting.get(output.request_id)
                if reply is None:
                    continue
                if logprobs := reply.push(output).logprobs:  # now, while the device computes the next pass
                    are_named = reply.request.sampling.logprob_token_ids is not None
                    reply.logprobs_by_token += [self._by_token(one, are_named=are_named) for one in logprobs]
                if reply.finish_reason == "error":
                    raise RuntimeError(f"request {output.request_id}: {reply.error}")
                if reply.finish_reason is not None:
                    if reply.wants_abort:
                        self._engine.abort(output.request_id)
                    yield waiting.pop(output.request_id)
        while self._engine.has_work:
            self._engine.step()

    def _params_for(
        self, count: int, sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * count
        if len(sampling_params) != count:
            raise ValueError(f"there are {count} prompts and {len(sampling_params)} sampling params: give one for each")
        return list(sampling_params)

    def _with_bad_words(self, index: int, params: SamplingParams) -> SamplingParams:
        encoder = self._text.encoder
        try:
            return with_bad_words(
                params, None if encoder is None else partial(encoder.encode, add_special_tokens=False)
            )
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from None

    def _with_grammar(self, index: int, params: SamplingParams) -> SamplingParams:
        if params.structured_outputs is None:
            return params
        try:
            grammar = self._text.grammars.build(of_structured_outputs(params.structured_outputs))
        except ParameterError as error:
            raise ValueError(f"prompt {index}: {error}") from None
        return msgspec.structs.replace(params, structured_outputs=None, grammar=grammar)

    def _check(self, index: int, token_ids: Sequence[int], params: SamplingParams) -> None:
        model = self.model_info
        try:
            check_prompt(token_ids, model.max_model_len, model.vocab_size)
            check_sampling(params, model.vocab_size, self._text.encoder is not None)
        except ParameterError as error:
            raise ValueError(f"prompt {index}: {error}") from None


def _settings(model: str, settings: dict[str, Any]) -> EngineSettings:
    """The types that a command line checks are checked here too."""
    try:
        settings = to_own_names(settings)
    except ValueError as error:
        raise ValueError(f"LLM({model!r}): {error}") from None
    unknown = sorted(settings.keys() - set(EngineSettings.__struct_fields__))
    if unknown:
        raise TypeError(f"LLM does not know {', '.join(unknown)}: see EngineSettings for what there is")
    try:
        return msgspec.convert({"model": model, **settings}, EngineSettings)
    except msgspec.ValidationError as error:
        raise ValueError(f"LLM({model!r}): {error}") from None


def _packed(token_ids: list[int]) -> Sequence[int]:
    """Four bytes a token: checks, keys and copies to a device are memory copies from here on."""
    try:
        return array("I", token_ids)
    except (OverflowError, TypeError):
        return token_ids  # some are no token ids: the check names one


def _request(request_id: str, token_ids: Sequence[int], params: SamplingParams) -> Request:
    if params.seed is None:
        return Request(request_id=request_id, prompt_token_ids=token_ids, sampling=params)
    return Request(request_id=request_id, prompt_token_ids=token_ids, sampling=params, noise_seed=params.seed % 2**63)
