"""Bodies of Anthropic's Messages API as clients send them: the fields and their types. Knows no chats.

Fields are those of https://docs.anthropic.com/en/api/messages and of the client package `anthropic`. A field for a
feature that is not supported has a type that only takes the values that do not use it. In messages, blocks and tools
other fields are ignored, as in every dialect; elsewhere they are refused by name.
"""

from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct

from mini_infer_apis.dialects.kv_hints import KVHints
from mini_infer_contract.launch import MAX_TARGET_MS
from mini_infer_web.api_errors import ApiError, Fault, refuse_field
from mini_infer_web.body_fields import UnknownFields, read_body

_MAX_BLOCKS = 20_000
"""Most messages and blocks of a request: more would delay every other request, and are more than a context takes."""


class CacheControl(Struct):
    """A mark of a prefix that the client wishes to be cached. It has no effect: all prefixes are, in blocks of 16
    tokens.
    """

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Struct, tag_field="type", tag="text"):
    """Text of the system prompt, of a user, of the assistant, or of a tool's result."""

    text: str
    cache_control: CacheControl | None = None
    citations: None = None
    """Documents are not read, so there is nothing to cite."""


class Base64Source(Struct, tag_field="type", tag="base64"):
    """An image that is part of the request."""

    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(Struct, tag_field="type", tag="url"):
    """An image that is fetched from where the server's operator allows."""

    url: Annotated[str, Meta(min_length=1)]


class ImageBlock(Struct, tag_field="type", tag="image"):
    """An image of a user, or of a tool's result."""

    source: Base64Source | UrlSource
    cache_control: CacheControl | None = None


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """The assistant's thinking of an earlier turn."""

    thinking: str
    signature: str | None = None
    """This field is not checked: whoever sends a conversation may write its thinking, too."""


class RedactedThinkingBlock(Struct, tag_field="type", tag="redacted_thinking"):
    """Thinking that only its maker can read: it is left out of the prompt."""

    data: str


INVALID_JSON = "INVALID_JSON"
"""The name under which Anthropic's documentation wraps arguments that are no JSON object, so that none are lost."""


class DirectCaller(Struct):
    """The model itself has called the tool."""

    type: Literal["direct"]


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A call of a tool that the assistant has made."""

    id: str
    name: str
    input: dict[str, Any] | str | None
    """An object; clients that could not read the model's output send it as a string."""
    cache_control: CacheControl | None = None
    caller: DirectCaller | None = None
    toolset_name: None = None


class ToolResultBlock(Struct, tag_field="type", tag="tool_result"):
    """The result of a tool."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None
    """If true, the result begins with "Error: " in the prompt."""
    cache_control: CacheControl | None = None
    toolset_name: None = None


ContentBlock = TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class MessageParam(Struct):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class Tool(Struct):
    """A tool of the client's own."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    """This field has no effect: a call's input is streamed as it is made."""
    defer_loading: bool | None = None
    """True is refused: all tools are shown."""
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class ToolChoice(Struct, forbid_unknown_fields=True):
    """Says if the model may, must or must not call tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, forbid_unknown_fields=True):
    """Says if the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None
    """Form in which thinking is sent: as it is, or with its text left out."""


class MessageFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """The answer's text is JSON of this schema."""

    schema: dict[str, Any]


class OutputConfig(Struct, forbid_unknown_fields=True):
    """The effort that the answer is worth, and the answer's form."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: MessageFormat | None = None


class KeepThinking(Struct, tag_field="type", tag="clear_thinking_20251015", forbid_unknown_fields=True):
    """All earlier thinking stays in the conversation, as it does here anyway."""

    keep: Literal["all"]


class ContextManagement(Struct, forbid_unknown_fields=True):
    """The parts that the server removes from a long conversation: none. Claude Code says so in each request."""

    edits: list[KeepThinking] = []


class Metadata(Struct, forbid_unknown_fields=True):
    """The user for whom the request is sent. It has no effect."""

    user_id: str | None = None


class Conversation(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that /v1/messages and /v1/messages/count_tokens have in common: all that the prompt depends on."""

    model: str
    messages: Annotated[list[MessageParam], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template; a field of vLLM's."""


class CountTokensRequest(Conversation, kw_only=True):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(Conversation, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=0)]
    """Most tokens of the answer; 0: the prompt is computed, and cached, and nothing is generated."""
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: None = None
    context_management: ContextManagement | None = None
    diagnostics: None = None
    inference_geo: None = None
    thread: None = None
    """A conversation that the server keeps: see THREAD_REFUSED."""
    mcp_servers: Annotated[list[Any], Meta(max_length=0)] | None = None
    # vLLM's and ours, as in chat completions.
    seed: int | None = None
    priority: int | None = None
    ttft_ms: Annotated[float, Meta(gt=0, le=MAX_TARGET_MS)] | None = None
    itl_ms: Annotated[float, Meta(gt=0, le=MAX_TARGET_MS)] | None = None
    deadline_ms: Annotated[float, Meta(gt=0, le=MAX_TARGET_MS)] | None = None
    cache_salt: str | None = None
    kv_hints: KVHints | None = None
    kv_policy: str | None = None
    kv_budget: int | None = None
    return_token_ids: bool | None = None
    """If true, the answer has `token_ids`; in a stream, a `ping` behind the events of each step has the step's."""
    resume_token_ids: Annotated[list[int], Meta(min_length=1)] | None = None
    """The gateway's field: output that another engine has made and its client has; the stream goes on after it."""


THREAD_REFUSED = "thread_unsupported_request"
"""The code at which Anthropic's clients leave out `thread` and send the whole conversation, as they did before."""

RequestType = TypeVar("RequestType", bound=Conversation)


def parse_request(
    body: dict[str, Any], request_type: type[RequestType], unknown: UnknownFields | None = None
) -> RequestType:
    """Returns the request. Raises an ApiError 400 that names all fields that are unknown, missing or of
    the wrong type.
    """
    _check_blocks(body.get("messages"))
    if body.get("thread") is not None:
        problem = "is not supported, for this server keeps no conversations: send the whole one, without thread"
        refuse_field("thread", problem, code=THREAD_REFUSED)
    parsed, faults = read_body(body, request_type, unknown)
    if parsed is None:
        raise ApiError.of_faults([_of_block(fault) for fault in faults])
    return parsed


def _of_block(fault: Fault) -> Fault:
    """Adds the types of blocks that there are to the fault of a block's type."""
    if fault.path[:1] != ("messages",) or fault.path[-1] != "type":
        return fault
    if fault.path[-2:] == ("source", "type"):
        return Fault(
            fault.path, (*fault.rest, "; send an image's base64 or its url, for files are not kept"), fault.code
        )
    read = "; this server reads text, image, thinking, redacted_thinking, tool_use and tool_result blocks"
    return Fault(fault.path, (*fault.rest, read), fault.code)


def _check_blocks(messages: object) -> None:
    """Refuses too many messages and blocks before any of them is looked at."""
    if not isinstance(messages, list):
        return
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    count = len(messages) + sum(len(content) for content in contents if isinstance(content, list))
    if count > _MAX_BLOCKS:
        refuse_field(
            "messages", f"have {count} messages and blocks, and this server reads {_MAX_BLOCKS} at most: join texts"
        )
