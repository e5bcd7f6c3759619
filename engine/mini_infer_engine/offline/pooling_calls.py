"""`LLM.embed`, `classify`, `encode` and `score`, with vLLM's names. Knows no engine: `LLM` runs the requests."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from mini_infer_engine.core_process.messages import ModelInfo
from mini_infer_engine.offline import vllm_surface
from mini_infer_engine.offline.pending import PendingRequest
from mini_infer_engine.offline.pooling import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Pooled,
    PooledPrompt,
    PoolingOutput,
    PoolingParams,
    PoolingReader,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    sides,
)
from mini_infer_engine.offline.prompts import Prompt
from mini_infer_engine.offline.requests import RequestMaker
from mini_infer_engine.text.pooled_prompts import pairs_of
from mini_infer_engine.text.pooled_result import similarities
from mini_infer_prompts.prompt import PromptEncoder


class PoolingCalls(ABC):
    """The part of `LLM` that answers with numbers."""

    model_info: ModelInfo
    _encoder: PromptEncoder | None
    _requests: RequestMaker

    @abstractmethod
    def _finish(self, requests: Sequence[PendingRequest], use_tqdm: bool) -> None:
        """Runs requests to their ends."""

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
        reader = self._reader("embed", pooling_params, truncate_prompt_tokens)
        return [
            EmbeddingRequestOutput(name, EmbeddingOutput(reader.embedding(reply).tolist()), ids, True, cached)
            for reply, name, ids, cached in self._pooled(reader.prompts(prompts, prompt_name), use_tqdm)
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
        reader = self._reader("classify", pooling_params)
        return [
            ClassificationRequestOutput(name, ClassificationOutput(reader.scores(reply)), ids, True, cached)
            for reply, name, ids, cached in self._pooled(reader.prompts(prompts), use_tqdm)
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
        reader = PoolingReader(self.model_info, self._encoder, pooling_params, truncate_prompt_tokens)
        task = pooling_task or reader.task
        if task not in ("embed", "classify"):
            raise ValueError(f"pooling_task = {task!r}: it is embed or classify; states of all tokens are not returned")
        reader.check(task)
        return [
            PoolingRequestOutput(name, PoolingOutput(reader.data(task, reply)), ids, True, cached)
            for reply, name, ids, cached in self._pooled(reader.prompts(prompts), use_tqdm)
        ]

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
        reader = self._reader("score", pooling_params, truncate_prompt_tokens)
        first, second = sides(data_1, data_2)
        if reader.pooler.is_cross_encoder:
            return [
                ScoringRequestOutput(name, ScoringOutput(reader.scores(reply)[0]), ids, True, cached)
                for reply, name, ids, cached in self._pooled(reader.pairs(pairs_of(first, second)), use_tqdm)
            ]
        made = self._pooled(reader.prompts([*first, *second]), use_tqdm)
        queries, documents = made[: len(first)], made[len(first) :]
        scores = similarities(*([reader.embedding(one.reply) for one in side] for side in (queries, documents)))
        queries = queries * len(documents) if len(queries) == 1 else queries
        return [
            ScoringRequestOutput(
                document.request_id,
                ScoringOutput(score),
                [*query.token_ids, *document.token_ids],
                True,
                query.num_cached_tokens + document.num_cached_tokens,
            )
            for query, document, score in zip(queries, documents, scores, strict=True)
        ]

    def _reader(
        self, task: str, params: PoolingParams | None, truncate_prompt_tokens: int | None = None
    ) -> PoolingReader:
        """Returns the reader of a call. Raises ValueError if the model cannot do the task."""
        reader = PoolingReader(self.model_info, self._encoder, params, truncate_prompt_tokens)
        reader.check(task)
        return reader

    def _pooled(self, prompts: Sequence[PooledPrompt], use_tqdm: bool) -> list[Pooled]:
        """Runs the prompts."""
        requests = [self._requests.pooled(None, prompt, index) for index, prompt in enumerate(prompts)]
        self._finish(requests, use_tqdm)
        return [Pooled.of(request, prompt) for request, prompt in zip(requests, prompts, strict=True)]
