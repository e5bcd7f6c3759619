"""Outputs of `LLM.embed`, `classify`, `score` and `encode`, with vLLM's names, and what these methods ask of the text
side. Knows no engine.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import msgspec

from mini_infer_engine.config.pooling.pooler_config import PoolerConfig
from mini_infer_engine.core_process.messages import ModelInfo
from mini_infer_engine.offline.pending import PendingRequest
from mini_infer_engine.offline.prompts import OfflinePrompt, Prompt, listed, packed, read_prompt
from mini_infer_engine.offline.reply import Reply
from mini_infer_engine.text.pooled_prompts import Pair, PooledPrompts, TextOrIds, check_task, prompt_prefix
from mini_infer_engine.text.pooled_result import check_dimensions, embedding_of, scores_of
from mini_infer_engine.text.tokenizing import whole
from mini_infer_engine.text.validation import ParameterError, check_prompt
from mini_infer_prompts.pairs import Cut
from mini_infer_prompts.prompt import PromptEncoder
from mini_infer_web.api_errors import ApiError


class PoolingParams(msgspec.Struct, kw_only=True):
    """Parameters of a pooling request; names are vLLM's."""

    truncate_prompt_tokens: int | None = None
    """Tokens to which longer texts are cut, special tokens included; -1: the context."""
    dimensions: int | None = None
    """Numbers of an embedding; None for all."""
    use_activation: bool | None = None
    """True if embeddings are normalised and scores made probabilities; None leaves it to the model."""
    task: Literal["embed", "classify"] | None = None
    """The kind of result, for `LLM.encode`; None for the model's."""


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of one prompt."""

    embedding: list[float]
    """The vector, of length 1 unless the model or the request says otherwise."""

    @property
    def hidden_size(self) -> int:
        """Numbers of the vector."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The scores of one prompt's classes."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The score of one pair."""

    score: float


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """The numbers of one prompt."""

    data: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The result of one prompt that was to be embedded."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class ClassificationRequestOutput:
    """The result of one prompt that was to be classified."""

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: list[int]
    finished: bool
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """The result of one pair that was to be scored."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    """The tokens of the pair; an embedding model's are those of both texts, one after the other."""
    finished: bool
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput:
    """The result of one prompt of `LLM.encode`."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    finished: bool
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """The tokens of one input, ready for the engine."""

    token_ids: list[int]
    type_start: int
    cache_salt: str = ""


class Pooled(NamedTuple):
    """One input's reply, and what every kind of result has."""

    reply: Reply
    request_id: str
    token_ids: list[int]
    num_cached_tokens: int

    @classmethod
    def of(cls, request: PendingRequest, prompt: PooledPrompt) -> Self:
        """Returns the reply to a request that has ended."""
        (reply,) = request.replies
        return cls(reply, request.request_id, prompt.token_ids, reply.num_cached_tokens)


class PoolingReader:
    """Tokenises and checks the inputs of one call."""

    def __init__(
        self,
        model: ModelInfo,
        encoder: PromptEncoder | None,
        params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> None:
        """Reads a call's parameters. Raises ValueError if they are none."""
        params = params or PoolingParams()
        if not isinstance(params, PoolingParams):
            raise ValueError(f"pooling_params is a {type(params).__name__}: give PoolingParams")
        if truncate_prompt_tokens is not None:
            params = msgspec.structs.replace(params, truncate_prompt_tokens=truncate_prompt_tokens)
        self._model, self._encoder, self._params = model, encoder, params

    @property
    def pooler(self) -> PoolerConfig:
        """The model's pooler."""
        return self._model.pooler

    @property
    def task(self) -> str:
        """The kind of result: what the call asks for, or else the model's."""
        return self._params.task or self._model.pooler.task

    def embedding(self, reply: Reply) -> "array[float]":
        """Returns the embedding of a reply."""
        params = self._params
        return embedding_of(reply.embedding, self.pooler, params.dimensions, use_activation=params.use_activation)

    def scores(self, reply: Reply) -> list[float]:
        """Returns the scores of a reply."""
        return scores_of(reply.embedding, self.pooler, use_activation=self._params.use_activation)

    def data(self, task: str, reply: Reply) -> list[float]:
        """Returns the embedding of a reply, or its scores, as the task is."""
        return self.embedding(reply).tolist() if task == "embed" else self.scores(reply)

    def check(self, task: str) -> None:
        """Raises ValueError if the model cannot do this, or a parameter is at fault."""
        try:
            check_task(self.pooler, task)
            check_dimensions(self.pooler, self._params.dimensions)
        except ApiError as error:
            raise ValueError(error.message) from None

    def prompts(self, prompts: Prompt | Sequence[Prompt], prompt_name: str | None = None) -> list[PooledPrompt]:
        """Returns the tokens of prompts. Raises ValueError that names the prompt at fault."""
        prefix = prompt_prefix(self.pooler, prompt_name)
        return [self._prompt(index, prompt, prefix) for index, prompt in enumerate(listed(prompts))]

    def _prompt(self, index: int, prompt: Prompt, prefix: str) -> PooledPrompt:
        given = {"prompt": prompt} if isinstance(prompt, str) else prompt
        if isinstance(given, dict) and "prompt_token_ids" not in given and isinstance(given.get("prompt"), str):
            text: TextOrIds = given["prompt"]
            salt = read_prompt(index, {**given, "prompt_token_ids": [0]}, None).cache_salt
        else:
            read: OfflinePrompt = read_prompt(index, prompt, self._encoder)
            text, salt = list(packed(index, read.token_ids)), read.cache_salt
        ids, type_start = self._tokens(text, f"prompt {index}", prefix)
        return PooledPrompt(ids, type_start, salt)

    def pairs(self, pairs: Sequence[Pair]) -> list[PooledPrompt]:
        """Returns the tokens of pairs of texts. Raises ValueError that names the pair at fault."""
        return [PooledPrompt(*self._tokens(pair, f"pair {index}")) for index, pair in enumerate(pairs)]

    def _tokens(self, given: TextOrIds | Pair, name: str, prefix: str = "") -> tuple[list[int], int]:
        model = self._model
        kept = self._params.truncate_prompt_tokens
        most = model.max_model_len - model.output_room
        if kept is not None and not -1 <= kept <= most:
            raise ValueError(f"truncate_prompt_tokens is {kept}; it must be from -1 to {most}")
        side: Literal["left", "right"] = "left" if model.output_room else "right"
        cut = None if kept is None else Cut(most if kept < 0 else kept, side)
        prompts = PooledPrompts([given], [(name,)], model.pooler, prefix=prefix, cut=cut)
        try:
            (ids,) = whole(prompts.token_ids(self._encoder, None))
            check_prompt(ids, model.max_model_len, model.vocab_size, name, output_room=model.output_room)
        except (ApiError, ParameterError) as error:
            raise ValueError(str(error) if isinstance(error, ParameterError) else error.message) from None
        return ids, prompts.type_starts[0]


def text_of(value: Any, name: str) -> str:
    """Returns the text of one side of a pair. Raises ValueError if it is none."""
    text = value.get("prompt", value.get("text")) if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ValueError(f"{name} = {str(value)[:200]!r}: pairs are of texts")
    return text


def sides(data_1: Any, data_2: Any) -> tuple[list[str], list[str]]:
    """Returns the texts of the two sides: one for all of the other, or one for each. Raises ValueError otherwise."""
    first, second = (
        [text_of(one, name) for one in (data if isinstance(data, list | tuple) else [data])]
        for data, name in ((data_1, "data_1"), (data_2, "data_2"))
    )
    if not second or len(first) not in (1, len(second)):
        raise ValueError(f"data_1 has {len(first)} texts and data_2 {len(second)}: give one, or one for each")
    return first, second
