"""vLLM's /score: how alike two texts are, or one text and each of several."""

from collections.abc import Sequence
from time import time
from typing import Any

from mini_infer_engine.api.answers import Score, Scores
from mini_infer_engine.api.dialects.base import GenerationSpec
from mini_infer_engine.api.dialects.fields import parse_fields
from mini_infer_engine.api.dialects.openai.shapes import encode_json
from mini_infer_engine.api.dialects.pooling.classify import usage_of
from mini_infer_engine.api.dialects.pooling.requests import LoadedModel, PoolingBody, read_texts
from mini_infer_engine.api.dialects.pooling.scores import PairScores
from mini_infer_engine.text.detokenizer import Decoder
from mini_infer_engine.text.output_text import OutputText
from mini_infer_web.api_errors import ApiError
from mini_infer_web.body_fields import UnknownFields

SCORE_PATHS = ("/score", "/v1/score")
_NAMES = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"), ("queries", "items"))
"""The names that vLLM has had for the two sides."""


class ScoreRequest(PoolingBody, kw_only=True):
    """POST /score. Each side is a text, an object with a `text`, or a list of either."""

    text_1: Any = None
    text_2: Any = None
    data_1: Any = None
    """Another name of `text_1`."""
    data_2: Any = None
    queries: Any = None
    """Another name of `text_1`."""
    documents: Any = None
    items: Any = None


class ScoreDialect:
    """The `Dialect` of one request for scores."""

    def __init__(self, model: LoadedModel) -> None:
        self._scores = PairScores(model)

    def parse(self, body: dict[str, Any], unknown: UnknownFields | None = None) -> GenerationSpec:
        """Parses the body; each pair becomes a prompt, or each text."""
        request = parse_fields(body, ScoreRequest, unknown)
        given = {name for pair in _NAMES for name in pair if getattr(request, name) is not None}
        for names in _NAMES:
            if given == set(names):
                return self._scores.spec(request, *(read_texts(getattr(request, name), name) for name in names))
        raise ApiError(400, "text_1 and text_2 are the two sides: send both, and no other pair", param="text_1")

    def renderer(self, spec: GenerationSpec, request_id: str, model: str, decoder: Decoder | None) -> "ScoreRenderer":
        """Returns the renderer of scores."""
        return ScoreRenderer(self._scores, spec, request_id, model)


class ScoreRenderer:
    """A `Renderer` of scores, which have no streams."""

    def __init__(self, scores: PairScores, spec: GenerationSpec, request_id: str, model: str) -> None:
        self._scores, self._spec, self._id, self._model = scores, spec, f"score-{request_id}", model

    def whole(self, replies: Sequence[OutputText]) -> bytes:
        """Renders the scores."""
        scores = self._scores.scores(self._spec, replies)
        data = [Score(index, "score", score) for index, score in enumerate(scores)]
        return encode_json(Scores(self._id, "list", int(time()), self._model, data, usage_of(replies)))
