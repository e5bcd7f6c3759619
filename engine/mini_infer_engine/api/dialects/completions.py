"""OpenAI's /v1/completions. Which fields are known, what they ask for, and what the answer looks like."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from mini_infer_contract.prompt import PromptEncoder, is_token_ids
from mini_infer_engine.api.dialects.base import GenerationSpec, OutputLimit
from mini_infer_engine.api.dialects.fields import GenerationFields, common_spec, parse_fields
from mini_infer_engine.api.dialects.neutral import BOTH, COMPLETION, is_one_of
from mini_infer_engine.api.dialects.openai_shapes import OpenAIRenderer, encode_json
from mini_infer_engine.text.output_text import OutputText
from mini_infer_engine.text.tokenizing import PromptLimits, Sliced, completion_ids

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    neutral = BOTH | COMPLETION

    prompt: Any = Field(default=None)
    """A string, token ids, or a list of these; checked where it becomes token ids."""

    @classmethod
    def is_neutral(cls, name: str, value: object, body: Mapping[str, Any]) -> bool:
        """Beside the table: the best of n choices are all of them."""
        if name == "best_of" and value is not None:
            return is_one_of(value, (body.get("n") or 1,))
        return super().is_neutral(name, value, body)

    @property
    def output_limit(self) -> OutputLimit:
        """Of each choice."""
        is_asked = self.max_tokens is not None
        return OutputLimit("max_tokens", self.max_tokens if is_asked else DEFAULT_MAX_TOKENS, is_asked)


class CompletionDialect:
    """A `Dialect`."""

    def parse(self, body: dict[str, Any]) -> GenerationSpec:
        """See `Dialect`."""
        request = parse_fields(body, CompletionRequest)
        prompt = request.prompt
        are_several = isinstance(prompt, list) and not is_token_ids(prompt)

        def prompt_ids(encoder: PromptEncoder | None, limits: PromptLimits) -> Sliced[list[list[int]]]:
            return completion_ids(encoder, body, limits)

        return common_spec(
            request,
            prompt_ids=prompt_ids,
            prompt_param="prompt",
            num_prompts=max(1, len(prompt)) if are_several else 1,
            needs_text=not is_token_ids(prompt),
            output_limit=request.output_limit,
        )

    def renderer(self, spec: GenerationSpec, request_id: str, model: str) -> "CompletionRenderer":
        """See `Dialect`."""
        return CompletionRenderer(spec, request_id, model)


class CompletionRenderer(OpenAIRenderer):
    """text_completion, whole and in chunks of the same name."""

    id_prefix = "cmpl-"
    object_name = chunk_object_name = "text_completion"

    def message(self, reply: OutputText) -> dict[str, Any]:
        """The text."""
        return {"text": reply.text}

    def text_delta(self, text: str) -> bytes:
        """A piece of it."""
        return b'"text":' + encode_json(text)
