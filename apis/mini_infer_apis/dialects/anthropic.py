"""Converts a request of Anthropic's Messages API, the conversation and all other fields, to chat completions' fields.

Engine and gateway make the same prompt of the result. Knows neither templates nor tokens, and no answers.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from mini_infer_apis.dialects.anthropic_request import (
    INVALID_JSON,
    Base64Source,
    ContentBlock,
    Conversation,
    CountTokensRequest,
    ImageBlock,
    MessageParam,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    Thinking,
    ThinkingBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    parse_request,
)
from mini_infer_apis.dialects.image_paths import with_images
from mini_infer_web.api_errors import FieldPath, Rename, refuse_field, renaming
from mini_infer_web.body_fields import UnknownFields

MESSAGES_PATH = "/v1/messages"
COUNT_TOKENS_PATH = "/v1/messages/count_tokens"

_BILLING_HEADER = "x-anthropic-billing-header"
"""Claude Code begins a block of its system prompt with this: a mark of each request, which is not for the model and
would keep every request from the cached prefix of the one before.
"""

Message = dict[str, Any]
Part = dict[str, Any]
"""A part of a chat message that is no text."""


def chat_body(body: dict[str, Any], path: str = MESSAGES_PATH, unknown: UnknownFields | None = None) -> dict[str, Any]:
    """Returns the body of an equivalent chat completion. Raises an ApiError 400 that names the fields at fault."""
    if path == COUNT_TOKENS_PATH:
        return chat_of(parse_request(body, CountTokensRequest, unknown))
    return chat_of(parse_request(body, MessagesRequest, unknown))


def own_path(path: FieldPath) -> FieldPath:
    """Returns the client's field from which a field of the chat was made.

    Messages are named as a whole: those of the chat are others, since turns of one role become one.
    """
    if path[:1] == ("messages",):
        return ("messages",)
    if path[:1] == ("tools",) and path[2:3] == ("function",):
        rest = path[3:]
        return (*path[:2], *(("input_schema", *rest[1:]) if rest[:1] == ("parameters",) else rest))
    if path[:2] == ("tool_choice", "function"):
        return ("tool_choice", *path[2:])
    return _own_name(path)


def client_paths(request: Conversation, chat: dict[str, Any]) -> Rename:
    """Returns what renames a field of the request's `chat`, as `own_path` does, with images in their own places."""
    return with_images(own_path, chat["messages"], list(_image_fields(request)))


def _image_fields(request: Conversation) -> Iterator[dict[FieldPath, FieldPath]]:
    """Yields the fields of each image, in the order in which `chat_of` takes them."""
    for index, message in enumerate(request.messages):
        if message.role != "user" or isinstance(message.content, str):
            continue
        for place, block in enumerate(message.content):
            where = ("messages", index, "content", place)
            parts: Iterable[tuple[FieldPath, object]] = [(where, block)]
            if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                parts = (((*where, "content", number), part) for number, part in enumerate(block.content))
            for path, part in parts:
                if isinstance(part, ImageBlock):
                    field = "data" if isinstance(part.source, Base64Source) else "url"
                    yield {(): path, ("image_url", "url"): (*path, "source", field)}


_own_name = renaming(
    {
        ("stop",): ("stop_sequences",),
        ("max_completion_tokens",): ("max_tokens",),
        ("thinking_token_budget",): ("thinking", "budget_tokens"),
        ("reasoning_effort",): ("output_config", "effort"),
        ("response_format",): ("output_config", "format"),
        ("response_format", "json_schema"): ("output_config", "format"),
        ("parallel_tool_calls",): ("tool_choice", "disable_parallel_tool_use"),
        ("user",): ("metadata", "user_id"),
    }
)


def chat_of(request: Conversation) -> dict[str, Any]:
    """Returns the body of an equivalent chat completion for a request whose fields are read already."""
    messages = _chat_messages(request)
    chat: dict[str, Any] = {"model": request.model, "messages": messages}
    if messages[-1]["role"] == "assistant":
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    if request.tools:
        chat["tools"] = [_tool(tool, ("tools", index)) for index, tool in enumerate(request.tools)]
    if request.tool_choice is not None:
        chat |= _tool_choice(request.tool_choice, request.tools or [])
    chat |= _thinking(request)
    if request.output_config is not None and (format_ := request.output_config.format) is not None:
        json_schema = {"name": "answer", "schema": format_.schema, "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": json_schema}
    return chat | (_sampling(request) if isinstance(request, MessagesRequest) else {})


def _sampling(request: MessagesRequest) -> dict[str, Any]:
    """Returns the fields that concern the answer alone."""
    fields = {
        "max_completion_tokens": request.max_tokens or 1,
        "stream": request.stream,
        "stop": request.stop_sequences or None,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "user": request.metadata.user_id if request.metadata is not None else None,
        "service_tier": {"standard_only": "default"}.get(request.service_tier or "", request.service_tier),
        "seed": request.seed,
        "priority": request.priority,
        "ttft_ms": request.ttft_ms,
        "itl_ms": request.itl_ms,
        "deadline_ms": request.deadline_ms,
        "cache_salt": request.cache_salt,
        "kv_hints": None if request.kv_hints is None else msgspec.to_builtins(request.kv_hints),
        "kv_policy": request.kv_policy,
        "kv_budget": request.kv_budget,
        "return_token_ids": request.return_token_ids,
        "resume_token_ids": request.resume_token_ids,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _thinking(request: Conversation) -> dict[str, Any]:
    """Returns the fields that say whether and how much the model thinks; none if the request leaves it to the model."""
    fields: dict[str, Any] = {}
    template_kwargs = dict(request.chat_template_kwargs or {})
    if request.thinking is not None:
        template_kwargs["enable_thinking"] = request.thinking.type != "disabled"
        budget = _budget(request.thinking, request)
        if budget is not None:
            fields["thinking_token_budget"] = budget
    if request.output_config is not None and request.output_config.effort is not None:
        fields["reasoning_effort"] = request.output_config.effort
    if template_kwargs:
        fields["chat_template_kwargs"] = template_kwargs
    return fields


def _budget(thinking: Thinking, request: Conversation) -> int | None:
    """Returns the number of tokens that the model may think for."""
    name = ("thinking", "budget_tokens")
    if thinking.type != "enabled":
        if thinking.budget_tokens is not None:
            refuse_field(name, f'goes with type "enabled", not {thinking.type!r}')
        return None
    if thinking.budget_tokens is None:
        refuse_field(name, 'is missing: "enabled" needs it')
    if isinstance(request, MessagesRequest) and thinking.budget_tokens >= request.max_tokens:
        refuse_field(name, f"is {thinking.budget_tokens}; it must be less than max_tokens ({request.max_tokens})")
    return thinking.budget_tokens


def _tool(tool: Tool, where: FieldPath) -> dict[str, Any]:
    if tool.defer_loading:
        refuse_field((*where, "defer_loading"), "is not supported: every tool is shown to the model")
    if tool.input_examples:
        refuse_field((*where, "input_examples"), "is not supported: write examples into the description")
    function: dict[str, Any] = {"name": tool.name, "parameters": {"type": "object"} | tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice, tools: Sequence[Tool]) -> dict[str, Any]:
    if not tools and choice.type != "none":
        refuse_field("tool_choice", "needs tools")
    if (choice.name is not None) != (choice.type == "tool"):
        refuse_field(("tool_choice", "name"), 'goes with type "tool", and is needed there')
    if choice.type == "tool" and all(tool.name != choice.name for tool in tools):
        refuse_field(("tool_choice", "name"), f"is {choice.name!r}, and no tool has that name")
    named = {"type": "function", "function": {"name": choice.name}}
    fields: dict[str, Any] = {"tool_choice": {"any": "required", "tool": named}.get(choice.type, choice.type)}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _chat_messages(request: Conversation) -> list[Message]:
    """Returns all messages; contents are lists until the end, so that turns of one role become one."""
    messages: list[Message] = []
    calls: set[str] = set()
    if request.system is not None and (texts := _system_texts(request.system)):
        messages.append({"role": "system", "content": texts})
    for index, message in enumerate(request.messages):
        where = ("messages", index)
        if message.role == "system":
            # As a developer's, it stays where it is, or goes to the front where the model's template wants that.
            if texts := _system_texts(_only_text(message, where)):
                messages.append({"role": "developer", "content": texts})
        elif message.role == "user":
            _check_results(message, calls, where)
            _add_user(messages, message, where)
        else:
            calls |= {block.id for block in _blocks(message) if isinstance(block, ToolUseBlock)}
            _add(messages, _assistant(message, where))
    _check_last(messages, ("messages", len(request.messages) - 1))
    return [message | {"content": _content(message["content"])} for message in messages]


def _system_texts(system: str | Sequence[TextBlock]) -> list[str]:
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    return [text for text in texts if text and not text.startswith(_BILLING_HEADER)]


def _only_text(message: MessageParam, where: FieldPath) -> str | list[TextBlock]:
    if isinstance(message.content, str):
        return message.content
    blocks = [block for block in message.content if isinstance(block, TextBlock)]
    if len(blocks) < len(message.content):
        refuse_field((*where, "content"), f"may hold text blocks only where the role is {message.role}")
    return blocks


def _add_user(messages: list[Message], message: MessageParam, where: FieldPath) -> None:
    """Adds a user's turn: results of tools are messages of their own, between the texts as they stand."""
    blocks = _blocks(message)
    if not blocks:
        refuse_field((*where, "content"), "is empty: send at least one block")
    for index, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            _add(messages, {"role": "user", "content": [block.text]})
        elif isinstance(block, ToolResultBlock):
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)})
        elif isinstance(block, ImageBlock):
            _add(messages, {"role": "user", "content": [_image(block)]})
        else:
            refuse_field((*where, "content", index, "type"), "is a block of the assistant's, and the role is user")


def _blocks(message: MessageParam) -> Sequence[ContentBlock]:
    return [TextBlock(message.content)] if isinstance(message.content, str) else message.content


def _check_results(message: MessageParam, calls: set[str], where: FieldPath) -> None:
    """Raises ApiError if a result belongs to none of the calls before it."""
    for index, block in enumerate(_blocks(message)):
        if isinstance(block, ToolResultBlock) and block.tool_use_id not in calls:
            problem = f"is {block.tool_use_id[:100]!r}, and no tool_use before it has that id: send the tool_use, too"
            refuse_field((*where, "content", index, "tool_use_id"), problem)


def _result(block: ToolResultBlock) -> list[str | Part]:
    """Returns the content of a tool's result: one text, or texts and images as they stand."""
    content = block.content if block.content is not None else ""
    error = "Error: " if block.is_error else ""
    if isinstance(content, str):
        return [error + content]
    if all(isinstance(part, TextBlock) for part in content):
        return [error + "\n".join(part.text for part in content if isinstance(part, TextBlock))]
    parts = [part.text if isinstance(part, TextBlock) else _image(part) for part in content]
    return [error.rstrip(), *parts] if error else parts


def _image(block: ImageBlock) -> Part:
    source = block.source
    url = f"data:{source.media_type};base64,{source.data}" if isinstance(source, Base64Source) else source.url
    return {"type": "image_url", "image_url": {"url": url}}


def _assistant(message: MessageParam, where: FieldPath) -> Message:
    blocks = _blocks(message)
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for index, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": _arguments(block.input)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif not isinstance(block, RedactedThinkingBlock):
            kind = "image" if isinstance(block, ImageBlock) else "tool_result"
            refuse_field((*where, "content", index, "type"), f"is {kind}, which stands in a user's message")
    turn: Message = {"role": "assistant", "content": texts}
    if calls:
        turn["tool_calls"] = calls
    if any(thoughts):
        turn["reasoning"] = "\n".join(thoughts)
    return turn


def _arguments(value: dict[str, Any] | str | None) -> str:
    """Returns the arguments of an earlier call; what an answer of ours has wrapped is unwrapped again."""
    if isinstance(value, dict) and list(value) == [INVALID_JSON]:
        value = value[INVALID_JSON]
    return value if isinstance(value, str) else json.dumps(value or {}, ensure_ascii=False)


def _add(messages: list[Message], turn: Message) -> None:
    """Adds a turn. Turns of one role that follow each other are one turn, as Anthropic says."""
    if not messages or messages[-1]["role"] != turn["role"]:
        messages.append(turn)
        return
    last = messages[-1]
    last["content"] += turn["content"]
    if "tool_calls" in turn:
        last["tool_calls"] = [*last.get("tool_calls", []), *turn["tool_calls"]]
    if "reasoning" in turn:
        last["reasoning"] = "\n".join([*filter(None, [last.get("reasoning")]), turn["reasoning"]])


def _check_last(messages: list[Message], where: FieldPath) -> None:
    """Checks an assistant's turn at the end, which is the beginning of the answer; an empty one asks for nothing."""
    if messages and messages[-1]["role"] == "assistant":
        if "tool_calls" in messages[-1]:
            refuse_field(where, "calls a tool: send the tool_result in a message of the user's after it")
        if not any(messages[-1]["content"]):
            del messages[-1]
    if not messages:
        refuse_field("messages", "hold no text: send a message of the user's")


def _content(parts: list[str | Part]) -> str | list[Part] | None:
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts] or None
