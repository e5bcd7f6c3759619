"""vLLM's /v1/chat/completions/batch: many conversations with one set of fields, one choice each.

Features that are not possible for many at once are refused by name: streams, tools, beams, several choices, an echo.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from mini_infer_engine.api.dialects.base import GenerationSpec
from mini_infer_engine.api.dialects.fields import MAX_CHOICES, parse_fields
from mini_infer_engine.api.dialects.neutral import Neutral
from mini_infer_engine.api.dialects.openai.chat import ChatDialect, ChatRenderer, ChatRequest
from mini_infer_engine.text.detokenizer import Decoder
from mini_infer_engine.text.tokenizing import ImageFiles, PromptLimits, Sliced
from mini_infer_engine.text.validation import ParameterError
from mini_infer_prompts.image_sources import image_sources
from mini_infer_prompts.prompt import PromptEncoder
from mini_infer_web.api_errors import ApiError, renaming
from mini_infer_web.body_fields import UnknownFields

_NOT_OF_MANY: Neutral = {
    "stream": (False,),
    "stream_options": (),
    "n": (1,),
    "tools": ([],),
    "tool_choice": ("none",),
    "use_beam_search": (False,),
    "echo": (False,),
    "resume_token_ids": (),
}

Conversation = Annotated[list[dict[str, Any]], Meta(min_length=1)]


class BatchChatRequest(ChatRequest, kw_only=True):
    """POST /v1/chat/completions/batch."""

    neutral: ClassVar[Neutral] = ChatRequest.neutral | _NOT_OF_MANY

    messages: Annotated[list[Conversation], Meta(min_length=1, max_length=MAX_CHOICES)]  # type: ignore[assignment]  # conversations


class BatchChatDialect:
    """The `Dialect` of /v1/chat/completions/batch."""

    def parse(self, body: dict[str, Any], unknown: UnknownFields | None = None) -> GenerationSpec:
        """Parses the body; each conversation becomes a prompt."""
        request = parse_fields(body, BatchChatRequest, unknown)
        chats = [body | {"messages": messages} for messages in request.messages]
        specs = []
        for index, chat in enumerate(chats):
            with _of_conversation(index):
                specs.append(ChatDialect().parse(chat, unknown))

        def prompt_ids(
            encoder: PromptEncoder | None, limits: PromptLimits | None, images: ImageFiles | None
        ) -> Sliced[list[list[int]]]:
            prompts = []
            for index, spec in enumerate(specs):
                with _of_conversation(index):
                    prompts += yield from spec.prompt_ids(encoder, limits, images)
            return prompts

        images = [image_sources(messages, ("messages", index)) for index, messages in enumerate(request.messages)]
        return replace(specs[0], prompt_ids=prompt_ids, num_prompts=len(specs), images=images)

    def renderer(self, spec: GenerationSpec, request_id: str, model: str, decoder: Decoder | None) -> ChatRenderer:
        """Returns the renderer of a chat's answer, with one choice for each conversation."""
        return ChatRenderer(spec, request_id, model, decoder)


@contextmanager
def _of_conversation(index: int) -> Iterator[None]:
    """Adds the index of a conversation to the errors within the block."""
    rename = renaming({("messages",): ("messages", index)})
    try:
        yield
    except ApiError as error:
        raise error.renamed(rename) from None
    except ParameterError as error:
        raise ApiError(400, str(error), param=error.path, code=error.code).renamed(rename) from None
