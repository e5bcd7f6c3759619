"""The offline API, with vLLM's names: prompts in, finished texts out, the engine in this process. No HTTP.

With `data_parallel_size` above 1 the engines are processes (data_parallel.offline).
"""

import gc
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any

import msgspec
from tqdm import tqdm

from mini_infer_engine.config.options.idle_options import idle_options
from mini_infer_engine.core import request as core_request
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import Output, Request, TokenLogprobs
from mini_infer_engine.core_process.build import build_engine
from mini_infer_engine.data_parallel.offline import OfflineEngines
from mini_infer_engine.dry.dry_run import DryRun
from mini_infer_engine.dry.vocabulary import DRY_MODEL
from mini_infer_engine.model_path import resolve_model
from mini_infer_engine.offline import vllm_surface
from mini_infer_engine.offline.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence, Logprob
from mini_infer_engine.offline.metrics import Counter, Gauge, RequestStateStats, metrics_of
from mini_infer_engine.offline.pooling_calls import PoolingCalls
from mini_infer_engine.offline.prompts import OfflinePrompt, Prompt, listed, packed, read_prompt
from mini_infer_engine.offline.sampling_params import SamplingParams, for_engine
from mini_infer_engine.offline.settings import model_name, settings_of
from mini_infer_engine.pooling.engine import PoolingEngine
from mini_infer_engine.structured.params import of_structured_outputs
from mini_infer_engine.text.bad_words import with_bad_words
from mini_infer_engine.text.detokenizer import Decoder
from mini_infer_engine.text.output_text import OutputText
from mini_infer_engine.text.pooled_prompts import check_task
from mini_infer_engine.text.text_model import TextModel
from mini_infer_engine.text.token_bytes import TokenBytes
from mini_infer_engine.text.validation import ParameterError, check_prompt, check_sampling
from mini_infer_prompts.prompt import chat_prompt_ids
from mini_infer_web.api_errors import ApiError

log = logging.getLogger(__name__)

Params = core_request.SamplingParams
"""Sampling parameters of either kind: callers' own, which can be changed, or those that the engine takes."""
Message = dict[str, Any]


class CompletionOutput(msgspec.Struct, frozen=True):
    """One generated text."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    cumulative_logprob: float | None = None
    """Sum of the log probabilities of its tokens; None if none were requested."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Log probabilities by token id at each position: of the output's token and of the most likely ones."""


class RequestOutput(msgspec.Struct, frozen=True):
    """The result of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Log probabilities at each position of the prompt, as in `CompletionOutput.logprobs`; None for its first token,
    which has none.
    """
    metrics: RequestStateStats | None = None
    """Times of the first of its outputs."""


class _Reply(OutputText):
    """The output of one request, with its log probabilities and times."""

    def __init__(self, request: Request, decoder: Decoder | None, arrival_time: float, arrived_s: float) -> None:
        """`arrival_time` is the time of day, `arrived_s` the same moment by the monotonic clock."""
        super().__init__(request, decoder)
        self.logprobs_by_token: list[dict[int, Logprob]] = []
        """Log probabilities of each output token."""
        self.arrival_time, self.arrived_s = arrival_time, arrived_s
        self.first_token_ts: float | None = None
        """Time of the first token by the monotonic clock; `last_token_ts` is that of the last token so far."""
        self.last_token_ts: float | None = None

    @property
    def stats(self) -> RequestStateStats:
        """The request's times, once it is finished."""
        at = self.arrived_s
        return RequestStateStats(
            num_generation_tokens=len(self.token_ids),
            arrival_time=self.arrival_time,
            queued_ts=at,
            scheduled_ts=None if self.queue_time_s is None else at + self.queue_time_s,
            first_token_ts=self.first_token_ts,
            last_token_ts=self.last_token_ts,
            first_token_latency=None if self.first_token_ts is None else self.first_token_ts - at,
        )


class LLM(PoolingCalls):
    """A model and its engine. Calls of several threads wait for each other."""

    def __init__(self, model: str | PathLike[str], **settings: Any) -> None:
        """Loads `model`; keywords are EngineSettings' fields, and vLLM's others at values that request nothing.

        Raises a ValueError that says why model or settings are at fault, and TypeError for an unknown keyword.
        """
        model = model_name(model)
        self.settings = settings_of(model, settings)
        if idle := idle_options(self.settings):
            log.warning("options without effect: %s", ", ".join(idle))
        dry_run = DryRun() if model == DRY_MODEL else None
        weights = self.settings.load_format != "dummy"
        directory = None if dry_run else resolve_model(model, self.settings.revision, weights=weights)
        self._directory, options = directory, self.settings
        self._text = TextModel.load(
            (model,),
            directory,
            options.skip_tokenizer_init,
            options.generation_config,
            chat_template=options.chat_template,
        )
        self._engine: Engine | PoolingEngine | OfflineEngines
        if self.settings.data_parallel_size > 1:
            self._engine = OfflineEngines(self.settings, dry_run)
            self.model_info = self._engine.model
        else:
            built = build_engine(self.settings, dry_run, record_events=False)
            self._engine, self.model_info = built.engine, built.model
        self._ids = itertools.count()
        self._engine_lock = threading.Lock()
        self._token_bytes = None if self._text.decoder is None else TokenBytes(self._text.decoder)
        self._decoded_tokens: dict[int, str] = {}
        """Texts of token ids of which log probabilities were returned; as many as the vocabulary has at most."""
        # What is here now stays: full collections, a tenth of a second each, need not walk it while requests run. When
        # this object goes, they walk again, and find the cycles that hold the weights.
        gc.collect()
        gc.freeze()
        weakref.finalize(self, gc.unfreeze)

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError for an unknown attribute; it says what to use in place of one of vLLM's."""
        if name in vllm_surface.METHODS:
            raise AttributeError(vllm_surface.missing("LLM", name, vllm_surface.METHODS[name]))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forgets the cached prefixes of earlier prompts; returns True. Nothing runs between calls, so the flags do
        nothing.

        Raises ValueError if the engines are processes of their own (`data_parallel_size` above 1).
        """
        with self._engine_lock:
            return self._engine_here("reset_prefix_cache").reset_prefix_cache()

    def get_metrics(self) -> list[Counter | Gauge]:
        """Returns the engine's counters and gauges. Raises ValueError as `reset_prefix_cache` does."""
        with self._engine_lock:
            return metrics_of(self._engine_here("get_metrics").stats(), self.settings.model)

    def _engine_here(self, method: str) -> Engine | PoolingEngine:
        if isinstance(self._engine, OfflineEngines):
            raise ValueError(f"LLM.{method} needs the engine in this process: leave data_parallel_size at 1")
        return self._engine

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the default sampling parameters, with the model's own values from its generation_config.json."""
        return SamplingParams(**self._text.defaults.sampling)

    def get_tokenizer(self) -> Any:
        """Returns transformers' tokenizer of the model's folder. Raises ImportError if transformers is
        not installed.
        """
        if self._directory is None:
            raise ValueError(f"get_tokenizer: the model {self.settings.model} pretends, and has no folder")
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise ImportError("get_tokenizer needs the package transformers: install it") from None
        return AutoTokenizer.from_pretrained(self._directory)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Returns one output for each prompt, in order. Parameters are one for all, or one for each; priorities one for
        each.

        Everything is checked before anything runs: a ValueError names the fault and leaves the engine as it was.
        Keywords of vLLM's that are not here are accepted at values that request nothing.
        """
        _refuse_lora(lora_request)
        vllm_surface.refuse_others("generate", others, vllm_surface.GENERATE)
        read = self._read(prompts)
        if priority is not None and len(priority) != len(read):
            raise ValueError(f"there are {len(read)} prompts and {len(priority)} priorities: give one for each")
        if priority is not None and not all(isinstance(number, int) for number in priority):
            raise ValueError(f"priority = {list(priority)!r}: they are integers, and the lower goes first")
        return self._run(read, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: None = None,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Returns one output for each conversation: a list of messages, or a list of such lists.

        Keywords of vLLM's that are not here are accepted at values that request nothing.
        """
        _refuse_lora(lora_request)
        vllm_surface.refuse_others("chat", others, vllm_surface.CHAT)
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
        rendered: list[OfflinePrompt] = []
        for index, conversation in enumerate(conversations):
            try:
                token_ids = chat_prompt_ids(encoder, options | {"messages": list(conversation)})
            except ApiError as error:
                raise ValueError(f"conversation {index}: {error.message}") from None
            rendered.append(OfflinePrompt(encoder.decode(token_ids, skip_special_tokens=False), token_ids))
        return self._run(rendered, sampling_params, use_tqdm)

    def _read(self, prompts: Prompt | Sequence[Prompt]) -> list[OfflinePrompt]:
        return [read_prompt(index, prompt, self._text.encoder) for index, prompt in enumerate(listed(prompts))]

    def _run(
        self,
        prompts: Sequence[OfflinePrompt],
        sampling_params: Params | Sequence[Params] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        params = self._params_for(len(prompts), sampling_params)
        groups = [
            self._requests(index, prompt, *chosen)
            for index, (prompt, chosen) in enumerate(zip(prompts, params, strict=True))
        ]
        if priority is not None:
            groups = [
                [msgspec.structs.replace(request, priority=number) for request in group]
                for group, number in zip(groups, priority, strict=True)
            ]
        replies = iter(self._replies([request for group in groups for request in group], use_tqdm))
        return [
            self._output([next(replies) for _ in group], prompt) for group, prompt in zip(groups, prompts, strict=True)
        ]

    def _requests(self, index: int, prompt: OfflinePrompt, copies: int, chosen: Params) -> list[Request]:
        """Returns one request for each output of a prompt. Log probabilities of the prompt itself are
        requested once.
        """
        params = self._with_grammar(index, self._with_bad_words(index, chosen))
        token_ids = packed(index, prompt.token_ids)
        self._check(index, token_ids, params)
        first = self._request(token_ids, params, prompt.cache_salt)
        if copies == 1:
            return [first]
        others = params if params.prompt_logprobs is None else msgspec.structs.replace(params, prompt_logprobs=None)
        seeds = [first.noise_seed + copy for copy in range(1, copies)]
        return [first, *(self._request(token_ids, others, prompt.cache_salt, seed) for seed in seeds)]

    def _request(
        self, token_ids: Sequence[int], params: Params, cache_salt: str = "", seed: int | None = None
    ) -> Request:
        seed = params.seed if seed is None else seed
        request = Request(
            request_id=str(next(self._ids)), prompt_token_ids=token_ids, sampling=params, cache_salt=cache_salt
        )
        return request if seed is None else msgspec.structs.replace(request, noise_seed=seed % 2**63)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = False, **others: Any
    ) -> list[BeamSearchOutput]:
        """Returns the `beam_width` most likely continuations of each prompt, the best first.

        Raises ValueError if a prompt or a parameter is at fault, or the KV cache is too small for so many beams.
        """
        vllm_surface.refuse_others("beam_search", others, vllm_surface.BEAM_SEARCH)
        searches: list[list[Request]] = []
        for index, prompt in enumerate(self._read(prompts)):
            token_ids = packed(index, prompt.token_ids)
            self._check(index, token_ids, params.sampling())
            searches.append(params.requests(token_ids, [str(next(self._ids)) for _ in range(params.beam_width)]))
        requests = [request for search in searches for request in search]
        replies = iter(self._replies(requests, use_tqdm))
        return [BeamSearchOutput([self._beam(next(replies)) for _ in search]) for search in searches]

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
        """Runs the requests and returns their outputs. Raises RuntimeError if a pass failed, ValueError if the engine
        refuses one of them.
        """
        arrival_time, arrived_s, decoder = time.time(), time.monotonic(), self._text.decoder
        with self._engine_lock:
            try:
                for request in requests:
                    if request.leads:
                        self._engine.add(request)
                outputs = self._engine.step() if requests else []  # a GPU computes while replies are made
                replies = [_Reply(request, decoder, arrival_time, arrived_s) for request in requests]
                finished = self._finished({reply.request.request_id: reply for reply in replies}, outputs)
                for _ in tqdm(finished, "prompts", len(replies), unit="prompt") if use_tqdm else finished:
                    pass
            except BaseException:
                for request in requests:  # after Ctrl-C or an error: the next call finds an idle engine
                    self._engine.abort(request.request_id)
                raise
        return replies

    def _output(self, replies: Sequence[_Reply], prompt: OfflinePrompt) -> RequestOutput:
        first = replies[0]
        prompt_logprobs = None
        if first.request.sampling.prompt_logprobs is not None:
            prompt_logprobs = [None, *map(self._by_token, first.prompt_logprobs)]
        outputs = [_completion(index, reply) for index, reply in enumerate(replies)]
        name, cached = first.request.request_id, first.num_cached_tokens
        return RequestOutput(
            name, prompt.text, list(prompt.token_ids), outputs, True, cached, prompt_logprobs, first.stats
        )

    def _by_token(self, position: TokenLogprobs, *, are_named: bool = False) -> dict[int, Logprob]:
        """Returns the position's own token, then the most likely ones in order, or those that were named."""
        own = position.token_id
        by_token = {own: Logprob(position.logprob, position.rank, self._decoded(own))}
        tops = zip(position.top_token_ids, position.top_logprobs, strict=True)
        for rank, (token_id, logprob) in enumerate(tops, start=1):
            if token_id != own:
                by_token[token_id] = Logprob(logprob, None if are_named else rank, self._decoded(token_id))
        return by_token

    def _decoded(self, token_id: int) -> str | None:
        if self._token_bytes is None:
            return None
        text = self._decoded_tokens.get(token_id)
        if text is None:
            text = self._decoded_tokens[token_id] = self._token_bytes.text(token_id)
        return text

    def _finished(self, waiting: dict[str, _Reply], outputs: list[Output]) -> Iterator[_Reply]:
        """Takes the first step's outputs, and steps until no reply waits; yields replies as they finish."""
        while waiting:
            now_s = time.monotonic()
            for output in outputs:
                reply = waiting.get(output.request_id)
                if reply is None:
                    continue
                if output.token_ids:
                    reply.last_token_ts = now_s
                    if reply.first_token_ts is None:
                        reply.first_token_ts = now_s
                if logprobs := reply.push(output).logprobs:  # now, while the device computes the next pass
                    are_named = reply.request.sampling.logprob_token_ids is not None
                    reply.logprobs_by_token += [self._by_token(one, are_named=are_named) for one in logprobs]
                if reply.finish_reason == "error":
                    raise RuntimeError(f"request {output.request_id}: {reply.error}")
                if reply.finish_reason is not None:
                    if reply.needs_abort:
                        self._engine.abort(output.request_id)
                    yield waiting.pop(output.request_id)
            outputs = self._engine.step() if waiting else []
        while self._engine.has_work:
            self._engine.step()

    def _params_for(self, count: int, params_or_list: Params | Sequence[Params] | None) -> list[tuple[int, Params]]:
        """Returns for each prompt the number of outputs and their sampling parameters; equal objects stay equal
        objects.
        """
        if params_or_list is None:
            params_or_list = self.get_default_sampling_params()
        if isinstance(params_or_list, Params):
            return [for_engine(params_or_list)] * count
        if not isinstance(params_or_list, Sequence):
            raise ValueError(
                f"sampling_params is a {type(params_or_list).__name__}: give SamplingParams, or a list of them"
            )
        if len(params_or_list) != count:
            raise ValueError(f"there are {count} prompts and {len(params_or_list)} sampling params: give one for each")
        read = {id(params): for_engine(params) for params in params_or_list}
        return [read[id(params)] for params in params_or_list]

    def _with_bad_words(self, index: int, params: Params) -> Params:
        encoder = self._text.encoder
        try:
            return with_bad_words(
                params, None if encoder is None else partial(encoder.encode, add_special_tokens=False)
            )
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from None

    def _with_grammar(self, index: int, params: Params) -> Params:
        if params.structured_outputs is None:
            return params
        try:
            grammar = self._text.grammars.build(of_structured_outputs(params.structured_outputs))
        except ParameterError as error:
            raise ValueError(f"prompt {index}: {error}") from None
        except ApiError as error:
            raise RuntimeError(f"prompt {index}: {error.message}") from None
        return msgspec.structs.replace(params, structured_outputs=None, grammar=grammar)

    def _check(self, index: int, token_ids: Sequence[int], params: Params) -> None:
        model = self.model_info
        try:
            check_task(model.pooler, "generate")
            check_prompt(token_ids, model.max_model_len, model.vocab_size)
            check_sampling(params, model.vocab_size, self._text.encoder is not None)
        except ParameterError as error:
            raise ValueError(f"prompt {index}: {error}") from None
        except ApiError as error:
            raise ValueError(error.message) from None


def _completion(index: int, reply: _Reply) -> CompletionOutput:
    completion = CompletionOutput(index, reply.text, reply.token_ids, reply.finish_reason, reply.stop_reason)
    if reply.request.sampling.logprobs is None:
        return completion
    total = sum(position.logprob for position in reply.logprobs)
    return msgspec.structs.replace(completion, cumulative_logprob=total, logprobs=reply.logprobs_by_token)


def _refuse_lora(lora_request: object) -> None:
    if lora_request is not None:
        raise ValueError("lora_request: adapters are not served yet: leave it out, or merge them into the weights")
