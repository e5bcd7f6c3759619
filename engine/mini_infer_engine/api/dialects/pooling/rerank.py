"""Cohere's and Jina's /rerank: documents in the order in which they answer a query."""

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import UNSET, Meta

from mini_infer_engine.api.answers import RankedDocument, Reranked, RerankedDocument
from mini_infer_engine.api.dialects.base import GenerationSpec
from mini_infer_engine.api.dialects.fields import parse_fields
from mini_infer_engine.api.dialects.openai.shapes import encode_json
from mini_infer_engine.api.dialects.pooling.classify import usage_of
from mini_infer_engine.api.dialects.pooling.requests import LoadedModel, PoolingBody, read_texts
from mini_infer_engine.api.dialects.pooling.scores import PairScores
from mini_infer_engine.text.detokenizer import Decoder
from mini_infer_engine.text.output_text import OutputText
from mini_infer_web.api_errors import refuse_field
from mini_infer_web.body_fields import UnknownFields

RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")


class RerankRequest(PoolingBody, kw_only=True):
    """POST /rerank."""

    query: Any
    """A text, or an object with a `text`."""
    documents: Any
    """Texts, or objects with a `text`."""
    top_n: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    """Documents in the answer; None or 0 for all."""
    return_documents: bool | None = None
    """False for an answer without texts."""


class RerankDialect:
    """The `Dialect` of one request to rerank documents."""

    def __init__(self, model: LoadedModel) -> None:
        self._scores = PairScores(model)
        self._texts: Sequence[str] = ()
        self._top_n: int | None = None

    def parse(self, body: dict[str, Any], unknown: UnknownFields | None = None) -> GenerationSpec:
        """Parses the body; each pair of query and document becomes a prompt, or each text."""
        request = parse_fields(body, RerankRequest, unknown)
        if isinstance(request.query, list):
            refuse_field(("query",), "must be a string, or an object with a text")
        if not isinstance(request.documents, list):
            refuse_field(("documents",), "must be a list of texts, or of objects with a text")
        documents = read_texts(request.documents, "documents")
        self._texts = () if request.return_documents is False else documents[0]
        self._top_n = request.top_n or None
        return self._scores.spec(request, read_texts(request.query, "query"), documents)

    def renderer(self, spec: GenerationSpec, request_id: str, model: str, decoder: Decoder | None) -> "RerankRenderer":
        """Returns the renderer of the documents."""
        return RerankRenderer(self._scores, spec, request_id, model, self._texts, self._top_n)


class RerankRenderer:
    """A `Renderer` of reranked documents, which have no streams."""

    def __init__(
        self,
        scores: PairScores,
        spec: GenerationSpec,
        request_id: str,
        model: str,
        texts: Sequence[str],
        top_n: int | None,
    ) -> None:
        self._scores, self._spec, self._id, self._model = scores, spec, f"rerank-{request_id}", model
        self._texts, self._top_n = texts, top_n

    def whole(self, replies: Sequence[OutputText]) -> bytes:
        """Renders the documents, the best first; equal ones stay in the request's order."""
        scores = self._scores.scores(self._spec, replies)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._top_n]
        results = [
            RerankedDocument(index, scores[index], RankedDocument(self._texts[index]) if self._texts else UNSET)
            for index in order
        ]
        return encode_json(Reranked(self._id, self._model, usage_of(replies), results))
