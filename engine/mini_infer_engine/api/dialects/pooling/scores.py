"""Scores pairs of texts: a cross-encoder reads each pair, an embedding model each text, whose cosines are compared."""

from collections.abc import Sequence

from mini_infer_engine.api.dialects.base import GenerationSpec
from mini_infer_engine.api.dialects.pooling.requests import LoadedModel, PoolingBody, pooler_of, pooling_spec
from mini_infer_engine.text.output_text import OutputText
from mini_infer_engine.text.pooled_prompts import pairs_of, prompt_prefix
from mini_infer_engine.text.pooled_result import embedding_of, scores_of, similarities
from mini_infer_web.api_errors import FieldPath, refuse_field


class PairScores:
    """The scores of queries and documents: one query for all documents, or one for each."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._num_queries = 1
        self._use_activation: bool | None = None

    def spec(
        self,
        request: PoolingBody,
        queries: tuple[Sequence[str], Sequence[FieldPath]],
        documents: tuple[Sequence[str], Sequence[FieldPath]],
    ) -> GenerationSpec:
        """Returns the spec. Raises ApiError 400 if there are neither one query nor as many as documents."""
        (first, first_paths), (second, second_paths) = queries, documents
        if len(first) not in (1, len(second)):
            refuse_field(first_paths[0][:1], f"has {len(first)} texts for {len(second)}: send one, or one for each")
        self._num_queries, self._use_activation = len(first), request.use_activation
        model = self._model()
        if pooler_of(model).is_cross_encoder:
            return pooling_spec(request, model, pairs_of(first, second), second_paths, "score")
        prefix = prompt_prefix(pooler_of(model), None)
        return pooling_spec(request, model, [*first, *second], [*first_paths, *second_paths], "score", prefix=prefix)

    def scores(self, spec: GenerationSpec, replies: Sequence[OutputText]) -> list[float]:
        """Returns a score for each document."""
        assert spec.pooled is not None, "scores are made of pooled prompts"
        pooler = spec.pooled.pooler
        if pooler.is_cross_encoder:
            return [scores_of(reply.embedding, pooler, use_activation=self._use_activation)[0] for reply in replies]
        vectors = [embedding_of(reply.embedding, pooler) for reply in replies]
        return similarities(vectors[: self._num_queries], vectors[self._num_queries :])
