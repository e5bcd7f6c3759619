"""OpenAI's /v1/embeddings: each input becomes a prompt whose embedding the engine returns, and no text."""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from mini_infer_engine.api.answers import Embedding, Embeddings
from mini_infer_engine.api.dialects.base import GenerationSpec
from mini_infer_engine.api.dialects.fields import parse_fields
from mini_infer_engine.api.dialects.openai.shapes import encode_json
from mini_infer_engine.api.dialects.pooling.classify import usage_of
from mini_infer_engine.api.dialects.pooling.requests import (
    LoadedModel,
    PoolingBody,
    pooler_of,
    pooling_spec,
    read_inputs,
)
from mini_infer_engine.text.detokenizer import Decoder
from mini_infer_engine.text.output_text import OutputText
from mini_infer_engine.text.pooled_prompts import prompt_prefix
from mini_infer_engine.text.pooled_result import embedding_of
from mini_infer_engine.text.validation import ParameterError
from mini_infer_web.api_errors import ApiError
from mini_infer_web.body_fields import UnknownFields

EMBEDDINGS_PATH = "/v1/embeddings"


class EmbeddingRequest(PoolingBody, kw_only=True):
    """POST /v1/embeddings; beside OpenAI's fields some of vLLM's."""

    input: Any
    """A string, token ids, or a list of either; checked where it becomes token ids."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    prompt_name: str | None = None
    """Name of one of the model's prompts (sentence-transformers'), which goes before each text."""


class EmbeddingDialect:
    """The `Dialect` of one request to /v1/embeddings."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._encoding = "float"
        self._use_activation: bool | None = None

    def parse(self, body: dict[str, Any], unknown: UnknownFields | None = None) -> GenerationSpec:
        """Parses the body; each input becomes a prompt."""
        request = parse_fields(body, EmbeddingRequest, unknown)
        self._encoding, self._use_activation = request.encoding_format or "float", request.use_activation
        inputs, paths = read_inputs(request.input, "input")
        model = self._model()
        try:
            prefix = prompt_prefix(pooler_of(model), request.prompt_name)
        except ParameterError as error:
            raise ApiError(400, str(error), param=error.path, code="invalid_value") from None
        return pooling_spec(request, model, inputs, paths, "embed", prefix=prefix, dimensions=request.dimensions)

    def renderer(
        self, spec: GenerationSpec, request_id: str, model: str, decoder: Decoder | None
    ) -> "EmbeddingRenderer":
        """Returns the renderer of embeddings."""
        return EmbeddingRenderer(spec, request_id, model, self._encoding, self._use_activation)


class EmbeddingRenderer:
    """A `Renderer` of embeddings, which have no streams."""

    def __init__(
        self, spec: GenerationSpec, request_id: str, model: str, encoding: str, use_activation: bool | None
    ) -> None:
        assert spec.pooled is not None, "embeddings are made of pooled prompts"
        self._id, self._model = f"embd-{request_id}", model
        self._pooler, self._dimensions = spec.pooled.pooler, spec.dimensions
        self._encoding, self._use_activation = encoding, use_activation

    def whole(self, replies: Sequence[OutputText]) -> bytes:
        """Renders the embeddings of all inputs."""
        data = [Embedding("embedding", index, self._encoded(reply.embedding)) for index, reply in enumerate(replies)]
        return encode_json(Embeddings("list", self._id, self._model, data, usage_of(replies)))

    def _encoded(self, pooled: bytes) -> str | list[float]:
        vector = embedding_of(pooled, self._pooler, self._dimensions, use_activation=self._use_activation)
        return base64.b64encode(vector.tobytes()).decode() if self._encoding == "base64" else vector.tolist()
