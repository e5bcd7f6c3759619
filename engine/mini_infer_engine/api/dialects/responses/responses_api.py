"""OpenAI's /v1/responses for one conversation: its fields, and their meaning.

The conversation is that of a chat (`chat_body` of mini_infer_apis), and the output is generated as the chat's. Stored
responses are not known here: fields that are about them are checked, returned, and have no effect.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from mini_infer_apis.dialects.image_paths import with_images
from mini_infer_apis.dialects.response_items import image_fields
from mini_infer_apis.dialects.response_tools import tool_paths
from mini_infer_apis.dialects.responses import chat_of
from mini_infer_apis.dialects.responses_request import ResponsesConversation, Tool, parse_conversation
from mini_infer_apis.stored_responses.request import KeptRequest
from mini_infer_engine.api.dialects.base import GenerationSpec, OutputLimit
from mini_infer_engine.api.dialects.fields import Body, GenerationFields, parse_fields
from mini_infer_engine.api.dialects.neutral import RESPONSES, Neutral
from mini_infer_engine.api.dialects.openai.chat import ChatDialect
from mini_infer_engine.api.dialects.responses.renderer import ResponsesRenderer
from mini_infer_engine.text.detokenizer import Decoder
from mini_infer_engine.text.validation import MAX_LOGPROBS
from mini_infer_web.api_errors import ApiError, FieldPath, Rename, renaming
from mini_infer_web.body_fields import UnknownFields

Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


_OF_CHATS = ("structured_outputs", "thinking_token_budget", "include_reasoning")
"""Fields of vLLM's that are a chat's and no completion's: the chat checks them."""


class ResponsesStreamOptions(Body):
    """The parts of a stream beside its events."""

    include_obfuscation: bool | None = None


class ResponsesRequest(GenerationFields, kw_only=True):
    """POST /v1/responses."""

    neutral: ClassVar[Neutral] = RESPONSES

    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    include: list[Includable] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    """Limit of calls of tools that a server runs itself: there is none here."""
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    client_metadata: dict[str, str] | None = None
    """Codex's session and turn, for OpenAI's records. No effect."""
    parallel_tool_calls: bool | None = None
    stream_options: ResponsesStreamOptions | None = None  # type: ignore[assignment]  # other options than a chat's
    chat_template_kwargs: dict[str, Any] | None = None
    enable_response_messages: bool | None = None
    """A field of vLLM's: if true, the answer has the prompt and the output as the model saw them."""
    # Checked as a `ResponsesConversation`.
    input: str | list[dict[str, Any]]
    reasoning: Any = None
    text: Any = None
    tools: Any = None
    tool_choice: Any = None
    # Checked as a chat's.
    prompt_cache_retention: Any = None
    service_tier: Any = None
    structured_outputs: Any = None
    thinking_token_budget: Any = None
    include_reasoning: Any = None


class ResponsesDialect:
    """The `Dialect` of one request to /v1/responses."""

    def __init__(self, kept: KeptRequest) -> None:
        """Takes in `kept` the fields that the server that keeps the response decides."""
        self._kept = kept
        self._body: dict[str, Any] = {}
        self._conversation = ResponsesConversation(input="")

    def parse(self, body: dict[str, Any], unknown: UnknownFields | None = None) -> GenerationSpec:
        """Parses the body as the chat that it is equivalent to; errors name the client's fields."""
        unknown = unknown or UnknownFields()
        parse_fields(body, ResponsesRequest, unknown)
        self._body = body | msgspec.structs.asdict(self._kept)
        self._conversation = parse_conversation(body, unknown)
        chat, of_chat = _chat_body(self._conversation, body), UnknownFields(unknown.mode)
        fields = list(image_fields(self._conversation.input))
        rename = with_images(_own_path(self._conversation.tools or ()), chat["messages"], fields)
        try:
            spec = ChatDialect().parse(chat, of_chat)
        except ApiError as error:
            raise error.renamed(rename) from None
        unknown.ignored += map(rename, of_chat.ignored)
        limit = spec.output_limit
        return replace(
            spec,
            in_clients_words=lambda error: error.renamed(rename),
            prompt_param="input",
            output_limit=OutputLimit("max_output_tokens", limit.max_tokens, limit.is_requested),
        )

    def renderer(self, spec: GenerationSpec, request_id: str, model: str, decoder: Decoder | None) -> ResponsesRenderer:
        """Returns the renderer of a response."""
        return ResponsesRenderer(spec, self._body, self._conversation, self._kept, model, decoder)


_PASSED = (*(set(GenerationFields.__struct_fields__) - {"stream_options"}), *_OF_CHATS)


def _chat_body(conversation: ResponsesConversation, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the chat with its other fields: fields of generation beside OpenAI's mean the same there."""
    return {name: body[name] for name in _PASSED if body.get(name) is not None} | chat_of(conversation, body)


def _own_path(tools: Sequence[Tool]) -> Rename:
    """Returns a function that names the client's field from which a field of the chat was made, given the client's
    `tools`.

    Items are named as a whole: several make one message.
    """

    def rename(path: FieldPath) -> FieldPath:
        if path[:1] == ("messages",):
            return ("input",)
        if path[:1] == ("tools",) and len(path) > 1:
            return tool_paths(tools)[int(path[1])] + (path[3:] if path[2:3] == ("function",) else path[2:])
        if path[:2] == ("tool_choice", "allowed_tools"):
            return ("tool_choice", *(part for part in path[2:] if part != "function"))
        return _own_name(path)

    return rename


_own_name = renaming(
    {
        ("max_completion_tokens",): ("max_output_tokens",),
        ("response_format",): ("text", "format"),
        ("response_format", "json_schema"): ("text", "format"),
        ("reasoning_effort",): ("reasoning", "effort"),
        ("verbosity",): ("text", "verbosity"),
        ("tool_choice", "function"): ("tool_choice",),
    }
)
