"""Makes the core's requests of prompts and parameters as callers of the offline API write them, and checks both."""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from mini_infer_engine.core import request as core_request
from mini_infer_engine.core.request import ImageInput, Request
from mini_infer_engine.core_process.messages import ModelInfo
from mini_infer_engine.offline.beams import BeamSearchParams
from mini_infer_engine.offline.images import OfflineImages
from mini_infer_engine.offline.pending import PendingGeneration, PendingRequest
from mini_infer_engine.offline.pooling import PooledPrompt
from mini_infer_engine.offline.prompts import OfflinePrompt, Prompt, listed, packed, read_prompt
from mini_infer_engine.offline.sampling_params import RequestOutputKind, SamplingParams, for_engine, kind_of
from mini_infer_engine.structured.params import of_structured_outputs
from mini_infer_engine.text.bad_words import with_bad_words
from mini_infer_engine.text.pooled_prompts import check_task
from mini_infer_engine.text.text_model import TextModel
from mini_infer_engine.text.validation import ParameterError, check_prompt, check_sampling
from mini_infer_prompts.prompt import PromptEncoder, chat_prompt_ids
from mini_infer_web.api_errors import ApiError

Params = core_request.SamplingParams
"""Sampling parameters of either kind: callers' own, which can be changed, or those that the engine takes."""
Message = dict[str, Any]


class RequestMaker:
    """Makes and checks requests for one model. All its errors are ValueErrors that name the prompt at fault."""

    def __init__(self, text: TextModel, model: ModelInfo) -> None:
        self._text, self._model = text, model
        self._images = OfflineImages.of(text, model)
        self._ids = map(str, itertools.count())
        """Ids of requests whose caller names none."""

    def default_params(self) -> SamplingParams:
        """Returns the default sampling parameters, with the model's own values from its generation_config.json."""
        return SamplingParams(**self._text.defaults.sampling)

    def prompts(self, prompts: Prompt | Sequence[Prompt]) -> list[OfflinePrompt]:
        """Returns the tokens of prompts."""
        return [
            read_prompt(index, prompt, self._text.encoder, self._images) for index, prompt in enumerate(listed(prompts))
        ]

    def conversations(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], options: Mapping[str, Any]
    ) -> list[OfflinePrompt]:
        """Returns the tokens of one conversation, or of each in a list, rendered with a chat request's `options`."""
        encoder = self._text.encoder
        if encoder is None:
            raise ValueError("chat needs a tokenizer, and this LLM has skip_tokenizer_init=True: use generate with ids")
        conversations: list[Any] = list(messages)
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        rendered: list[OfflinePrompt] = []
        for index, conversation in enumerate(conversations):
            try:
                token_ids, images = self._chat(encoder, {**options, "messages": list(conversation)})
            except ApiError as error:
                raise ValueError(f"conversation {index}: {error.message}") from None
            text = encoder.decode(token_ids, skip_special_tokens=False)
            rendered.append(OfflinePrompt(text, token_ids, images=images))
        return rendered

    def _chat(self, encoder: PromptEncoder, body: dict[str, Any]) -> tuple[list[int], Sequence[ImageInput]]:
        return (chat_prompt_ids(encoder, body), ()) if self._images is None else self._images.in_chat(body)

    def params_of(self, count: int, params_or_list: Params | Sequence[Params] | None) -> list[tuple[int, Params]]:
        """Returns for each of `count` prompts the number of outputs and their sampling parameters; equal objects stay
        equal objects.
        """
        if params_or_list is None:
            params_or_list = self.default_params()
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

    def one(
        self, request_id: str | None, prompt: Prompt, params: Params | None, priority: int = 0
    ) -> PendingGeneration:
        """Returns the request of one prompt, whose outputs come as its parameters say."""
        (read,), params = self.prompts([prompt]), self.default_params() if params is None else params
        [(copies, chosen)] = self.params_of(1, params)
        return self.generation(0, read, copies, chosen, priority, kind_of(params), request_id)

    def generation(
        self,
        index: int,
        prompt: OfflinePrompt,
        copies: int,
        chosen: Params,
        priority: int = 0,
        kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY,
        request_id: str | None = None,
    ) -> PendingGeneration:
        """Returns the request of a prompt. Log probabilities of the prompt itself are requested once."""
        params = self._with_grammar(index, self._with_bad_words(index, chosen))
        token_ids = packed(index, prompt.token_ids)
        self._check(index, token_ids, params)
        name = request_id or next(self._ids)
        names = [name] if copies == 1 else [f"{copy}_{name}" for copy in range(copies)]
        first = Request(
            request_id=names[0],
            prompt_token_ids=token_ids,
            images=list(prompt.images),
            sampling=params,
            cache_salt=prompt.cache_salt,
            priority=priority,
        )
        if params.seed is not None:
            first = msgspec.structs.replace(first, noise_seed=params.seed % 2**63)
        requests = [first]
        if copies > 1:
            others = params if params.prompt_logprobs is None else msgspec.structs.replace(params, prompt_logprobs=None)
            requests += [
                msgspec.structs.replace(
                    first, request_id=other, sampling=others, noise_seed=(first.noise_seed + copy) % 2**63
                )
                for copy, other in enumerate(names[1:], start=1)
            ]
        return PendingGeneration(name, requests, prompt, kind)

    def beams(self, index: int, prompt: OfflinePrompt, params: BeamSearchParams) -> PendingRequest:
        """Returns the request of a prompt, with one core request for each beam."""
        token_ids = packed(index, prompt.token_ids)
        self._check(index, token_ids, params.sampling())
        name = next(self._ids)
        names = [f"{beam}_{name}" for beam in range(params.beam_width)]
        requests = params.requests(token_ids, names)
        images = list(prompt.images)
        return PendingRequest(name, [msgspec.structs.replace(request, images=images) for request in requests])

    def pooled(self, request_id: str | None, prompt: PooledPrompt, index: int = 0) -> PendingRequest:
        """Returns the request of one input of an embedding or a score."""
        request = Request(
            request_id=request_id or next(self._ids),
            prompt_token_ids=packed(index, prompt.token_ids),
            sampling=core_request.SamplingParams(temperature=0.0, max_tokens=1),
            embeds=True,
            token_type_start=prompt.type_start,
            cache_salt=prompt.cache_salt,
        )
        return PendingRequest(request.request_id, [request])

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
        model = self._model
        try:
            check_task(model.pooler, "generate")
            check_prompt(token_ids, model.max_model_len, model.vocab_size)
            check_sampling(params, model.vocab_size, self._text.encoder is not None)
        except ParameterError as error:
            raise ValueError(f"prompt {index}: {error}") from None
        except ApiError as error:
            raise ValueError(error.message) from None
