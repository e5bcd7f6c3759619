"""SageMaker's /invocations, as vLLM has it: the fields of the body say which kind of request it is."""

from typing import Any

from mini_infer_engine.api.dialects.base import Dialect, GenerationSpec, Renderer
from mini_infer_engine.api.dialects.openai.chat import ChatDialect
from mini_infer_engine.api.dialects.openai.completions import CompletionDialect
from mini_infer_engine.text.detokenizer import Decoder
from mini_infer_web.api_errors import ApiError
from mini_infer_web.body_fields import UnknownFields


class InvocationDialect:
    """The `Dialect` of one request to /invocations."""

    _dialect: Dialect

    def parse(self, body: dict[str, Any], unknown: UnknownFields | None = None) -> GenerationSpec:
        """Parses the body as a chat or a completion, by its fields."""
        if ("messages" in body) == ("prompt" in body):
            raise ApiError(400, "send either messages, as to a chat, or a prompt, as to a completion", param="messages")
        self._dialect = ChatDialect() if "messages" in body else CompletionDialect()
        return self._dialect.parse(body, unknown)

    def renderer(self, spec: GenerationSpec, request_id: str, model: str, decoder: Decoder | None) -> Renderer:
        """Returns the renderer of the chat or the completion."""
        return self._dialect.renderer(spec, request_id, model, decoder)
