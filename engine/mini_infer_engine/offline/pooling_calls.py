"""`LLM.embed`, `classify`, `encode` and `score`, with vLLM's names. Knows no engine: `LLM` runs the requests."""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core_process.messages import ModelInfo
from mini_infer_engine.offline import vllm_surface
from mini_infer_engine.offline.pooling import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PooledPrompt,
    PoolingOutput,
    PoolingParams,
    PoolingReader,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    sides,
)
from mini_infer_engine.offline.prompts import Prompt, packed
from mini_infer_engine.text.output_text import OutputText
from mini_infer_engine.text.pooled_prompts import Pair
from mini_infer_engine.text.pooled_result import cosine, embedding_of, scores_of
from mini_infer_engine.text.text_model import TextModel


class _Pooled(NamedTuple):
    """The result of one input."""

    numbers: bytes
    """Packed fp32, before any normalisation or activation."""
    request_id: str
    token_ids: list[int]
    num_cached_tokens: int


class PoolingCalls:
    """The part of `LLM` that answers with numbers."""

    model_info: ModelInfo
    _text: TextModel
    _ids: Iterator[int]

    def _replies(self, requests: Sequence[Request], use_tqdm: bool) -> Sequence[OutputText]:
        """Runs the requests and returns their outputs."""
        raise NotImplementedError

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        **others: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Returns the embedding of each prompt, as the model's folder says it is pooled: by default the normalised
        hidden state of the last token.

        `prompt_name` names one of the model's prompts (sentence-transformers'), which goes before each text. Raises
        ValueError if a prompt is at fault, or the model makes no embeddings.
        """
        vllm_surface.refuse_others("embed", others, vllm_surface.POOLING)
        reader, params = self._pooling("embed", pooling_params, truncate_prompt_tokens)
        return [
            EmbeddingRequestOutput(name, EmbeddingOutput(self._embedding(made, params).tolist()), ids, True, cached)
            for made, name, ids, cached in self._pooled(reader.prompts(prompts, prompt_name), use_tqdm)
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        pooling_params: PoolingParams | None = None,
        **others: Any,
    ) -> list[ClassificationRequestOutput]:
        """Returns the scores of the model's labels for each prompt. Raises ValueError if a prompt is at fault, or the
        model is no classifier.
        """
        vllm_surface.refuse_others("classify", others, vllm_surface.POOLING)
        reader, params = self._pooling("classify", pooling_params)
        return [
            ClassificationRequestOutput(name, ClassificationOutput(self._scores(made, params)), ids, True, cached)
            for made, name, ids, cached in self._pooled(reader.prompts(prompts), use_tqdm)
        ]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_task: str | None = None,
        **others: Any,
    ) -> list[PoolingRequestOutput]:
        """Returns the embedding or the scores of each prompt, whichever the model makes. Raises ValueError if a prompt
        is at fault, or the model does not do `pooling_task`, which is "embed" or "classify".
        """
        vllm_surface.refuse_others("encode", others, vllm_surface.POOLING)
        task = pooling_task or (pooling_params and pooling_params.task) or self.model_info.pooler.task
        if task not in ("embed", "classify"):
            raise ValueError(f"pooling_task = {task!r}: it is embed or classify; states of all tokens are not returned")
        reader, params = self._pooling(task, pooling_params, truncate_prompt_tokens)
        outputs = []
        for made, name, ids, cached in self._pooled(reader.prompts(prompts), use_tqdm):
            data = self._embedding(made, params).tolist() if task == "embed" else self._scores(made, params)
            outputs.append(PoolingRequestOutput(name, PoolingOutput(data), ids, True, cached))
        return outputs

    def score(
        self,
        data_1: Any,
        data_2: Any,
        use_tqdm: bool = True,
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        **others: Any,
    ) -> list[ScoringRequestOutput]:
        """Returns a score for each pair of a text of `data_1` and one of `data_2`: one for all, or one for each.

        A cross-encoder reads each pair; the score of an embedding model is the cosine of two embeddings. Raises
        ValueError if a text is at fault, or the model makes no scores.
        """
        vllm_surface.refuse_others("score", others, vllm_surface.POOLING)
        reader, params = self._pooling("score", pooling_params, truncate_prompt_tokens)
        first, second = sides(data_1, data_2)
        if reader.pooler.is_cross_encoder:
            every = first * len(second) if len(first) == 1 else first
            pairs = [Pair(*pair) for pair in zip(every, second, strict=True)]
            return [
                ScoringRequestOutput(name, ScoringOutput(self._scores(made, params)[0]), ids, True, cached)
                for made, name, ids, cached in self._pooled(reader.pairs(pairs), use_tqdm)
            ]
        each = self._pooled(reader.prompts([*first, *second]), use_tqdm)
        queries, documents = each[: len(first)], each[len(first) :]
        queries = queries * len(documents) if len(queries) == 1 else queries
        return [
            ScoringRequestOutput(
                document.request_id,
                ScoringOutput(
                    cosine(self._embedding(query.numbers, params), self._embedding(document.numbers, params))
                ),
                [*query.token_ids, *document.token_ids],
                True,
                query.num_cached_tokens + document.num_cached_tokens,
            )
            for query, document in zip(queries, documents, strict=True)
        ]

    def _pooling(
        self, task: str, params: PoolingParams | None, truncate_prompt_tokens: int | None = None
    ) -> tuple[PoolingReader, PoolingParams]:
        """Returns the reader of a call's inputs and its parameters. Raises ValueError if the model cannot do it."""
        params = params or PoolingParams()
        if not isinstance(params, PoolingParams):
            raise ValueError(f"pooling_params is a {type(params).__name__}: give PoolingParams")
        if truncate_prompt_tokens is not None:
            params = msgspec.structs.replace(params, truncate_prompt_tokens=truncate_prompt_tokens)
        reader = PoolingReader(self.model_info, self._text.encoder, params)
        reader.check(task)
        return reader, params

    def _pooled(self, prompts: Sequence[PooledPrompt], use_tqdm: bool) -> list[_Pooled]:
        """Runs the prompts."""
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        requests = [
            Request(
                request_id=str(next(self._ids)),
                prompt_token_ids=packed(index, prompt.token_ids),
                sampling=sampling,
                embeds=True,
                token_type_start=prompt.type_start,
                cache_salt=prompt.cache_salt,
            )
            for index, prompt in enumerate(prompts)
        ]
        replies = self._replies(requests, use_tqdm)
        return [
            _Pooled(reply.embedding, reply.request.request_id, prompt.token_ids, reply.num_cached_tokens)
            for reply, prompt in zip(replies, prompts, strict=True)
        ]

    def _embedding(self, numbers: bytes, params: PoolingParams) -> "array[float]":
        pooler = self.model_info.pooler
        return embedding_of(numbers, pooler, params.dimensions, use_activation=params.use_activation)

    def _scores(self, numbers: bytes, params: PoolingParams) -> list[float]:
        return scores_of(numbers, self.model_info.pooler, use_activation=params.use_activation)
