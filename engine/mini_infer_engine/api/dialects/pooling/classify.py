"""vLLM's /classify: each input becomes scores of the model's labels."""

from collections.abc import Sequence
from time import time
from typing import Any

from mini_infer_engine.api.answers import Class, Classes, PoolingUsage
from mini_infer_engine.api.dialects.base import GenerationSpec
from mini_infer_engine.api.dialects.fields import parse_fields
from mini_infer_engine.api.dialects.openai.shapes import encode_json
from mini_infer_engine.api.dialects.pooling.requests import LoadedModel, PoolingBody, pooling_spec, read_inputs
from mini_infer_engine.text.detokenizer import Decoder
from mini_infer_engine.text.output_text import OutputText
from mini_infer_engine.text.pooled_result import scores_of
from mini_infer_web.body_fields import UnknownFields

CLASSIFY_PATHS = ("/classify", "/v1/classify")


class ClassifyRequest(PoolingBody, kw_only=True):
    """POST /classify."""

    input: Any
    """A string, token ids, or a list of either; checked where it becomes token ids."""


class ClassifyDialect:
    """The `Dialect` of one request for classes."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._use_activation: bool | None = None

    def parse(self, body: dict[str, Any], unknown: UnknownFields | None = None) -> GenerationSpec:
        """Parses the body; each input becomes a prompt."""
        request = parse_fields(body, ClassifyRequest, unknown)
        self._use_activation = request.use_activation
        inputs, paths = read_inputs(request.input, "input")
        return pooling_spec(request, self._model(), inputs, paths, "classify")

    def renderer(self, spec: GenerationSpec, request_id: str, model: str, decoder: Decoder | None) -> "ClassRenderer":
        """Returns the renderer of classes."""
        return ClassRenderer(spec, request_id, model, self._use_activation)


class ClassRenderer:
    """A `Renderer` of classes, which have no streams."""

    def __init__(self, spec: GenerationSpec, request_id: str, model: str, use_activation: bool | None) -> None:
        assert spec.pooled is not None, "classes are made of pooled prompts"
        self._pooler, self._id, self._model = spec.pooled.pooler, f"classify-{request_id}", model
        self._use_activation = use_activation

    def whole(self, replies: Sequence[OutputText]) -> bytes:
        """Renders the classes of all inputs."""
        data = [self._class(index, reply) for index, reply in enumerate(replies)]
        return encode_json(Classes(self._id, "list", int(time()), self._model, data, usage_of(replies)))

    def _class(self, index: int, reply: OutputText) -> Class:
        scores = scores_of(reply.embedding, self._pooler, use_activation=self._use_activation)
        best = max(range(len(scores)), key=scores.__getitem__)
        return Class(index, self._pooler.labels[best], scores, len(scores))


def usage_of(replies: Sequence[OutputText]) -> PoolingUsage:
    """Returns the tokens of all inputs."""
    tokens = sum(len(reply.request.prompt_token_ids) for reply in replies)
    return PoolingUsage(tokens, tokens)
