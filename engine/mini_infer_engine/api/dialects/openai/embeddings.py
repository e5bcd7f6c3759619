"""OpenAI's /v1/embeddings: each input becomes a prompt whose hidden state the engine returns, and no text."""

import base64
import math
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from mini_infer_engine.api.answers import Embedding, Embeddings, EmbeddingsUsage
from mini_infer_engine.api.dialects.base import GenerationSpec, OutputLimit
from mini_infer_engine.api.dialects.fields import Body, parse_fields
from mini_infer_engine.api.dialects.openai.shapes import encode_json
from mini_infer_engine.text.detokenizer import Decoder
from mini_infer_engine.text.output_text import OutputText
from mini_infer_engine.text.tokenizing import PromptLimits, Sliced, completion_ids
from mini_infer_engine.text.truncation import Truncation, TruncationSide
from mini_infer_prompts.prompt import PromptEncoder, is_token_ids
from mini_infer_web.api_errors import ApiError, renaming
from mini_infer_web.body_fields import UnknownFields

EMBEDDINGS_PATH = "/v1/embeddings"
MAX_INPUTS = 2048
"""Most inputs of one request, OpenAI's limit."""


class EmbeddingRequest(Body, kw_only=True):
    """POST /v1/embeddings; beside OpenAI's fields some of vLLM's."""

    model: str | None = None
    input: Any
    """A string, token ids, or a list of either; checked where it becomes token ids."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None
    # vLLM's.
    add_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: str | None = None
    request_id: Annotated[str, Meta(pattern=r"^[!-~]{1,200}$")] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    truncation_side: TruncationSide | None = None
    use_activation: Literal[True] | None = None
    """Embeddings are always normalised."""


class EmbeddingDialect:
    """The `Dialect` of one request to /v1/embeddings."""

    def __init__(self) -> None:
        self._encoding = "float"

    def parse(self, body: dict[str, Any], unknown: UnknownFields | None = None) -> GenerationSpec:
        """Parses the body; each input becomes a prompt."""
        request = parse_fields(body, EmbeddingRequest, unknown)
        self._encoding = request.encoding_format or "float"
        inputs = request.input
        are_several = isinstance(inputs, list) and not is_token_ids(inputs)
        if are_several and not 1 <= len(inputs) <= MAX_INPUTS:
            message = f"input has {len(inputs)} parts; it must have from 1 to {MAX_INPUTS}: send several requests"
            raise ApiError(400, message, param="input", code="invalid_value")
        prompts = {"prompt": inputs} | {name: value for name, value in body.items() if name == "add_special_tokens"}

        def prompt_ids(encoder: PromptEncoder | None, limits: PromptLimits | None) -> Sliced[list[list[int]]]:
            return completion_ids(encoder, prompts, limits)

        kept = request.truncate_prompt_tokens
        return GenerationSpec(
            model=request.model,
            prompt_ids=prompt_ids,
            prompt_param="input",
            in_clients_words=lambda error: error.renamed(_own_path),
            num_prompts=len(inputs) if are_several else 1,
            copies=1,
            needs_text=not is_token_ids(inputs),
            sampling={"temperature": 0.0},
            output_limit=OutputLimit("max_tokens", 1, False),
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
            request_id=request.request_id,
            truncation=None if kept is None else Truncation(kept, request.truncation_side or "left"),
            embeds=True,
            dimensions=request.dimensions,
        )

    def renderer(
        self, spec: GenerationSpec, request_id: str, model: str, decoder: Decoder | None
    ) -> "EmbeddingRenderer":
        """Returns the renderer of embeddings."""
        return EmbeddingRenderer(request_id, model, self._encoding, spec.dimensions)


class EmbeddingRenderer:
    """A `Renderer` of embeddings, which have no streams."""

    def __init__(self, request_id: str, model: str, encoding: str, dimensions: int | None) -> None:
        self._id, self._model = f"embd-{request_id}", model
        self._encoding, self._dimensions = encoding, dimensions

    def whole(self, replies: Sequence[OutputText]) -> bytes:
        """Renders the embeddings of all inputs."""
        data = [Embedding("embedding", index, self._encoded(reply.embedding)) for index, reply in enumerate(replies)]
        tokens = sum(len(reply.request.prompt_token_ids) for reply in replies)
        return encode_json(Embeddings("list", self._id, self._model, data, EmbeddingsUsage(tokens, tokens)))

    def _encoded(self, embedding: bytes) -> str | list[float]:
        vector = shortened(embedding, self._dimensions)
        return base64.b64encode(vector.tobytes()).decode() if self._encoding == "base64" else vector.tolist()


def shortened(embedding: bytes, dimensions: int | None) -> "array[float]":
    """Returns the first so many numbers, of length 1 again: for models trained so that these mean something alone."""
    vector = array("f", embedding)
    if dimensions is None or dimensions >= len(vector):
        return vector
    first = vector[:dimensions]
    norm = math.sqrt(math.fsum(value * value for value in first)) or 1.0
    return array("f", [value / norm for value in first])


_own_path = renaming({("prompt",): ("input",)})
"""Renames prompts to inputs, which they are here."""
