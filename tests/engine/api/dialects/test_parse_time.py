"""No body that is let in holds up the event loop: what it takes to decode and to check, in seconds of the processor.

Seconds of the processor, not of the clock: other processes of a busy machine are no part of it. On the machine that the
limits were chosen on, nothing here takes 50 ms; before there were limits, a body of 11 MB took 15 s.
"""

import json
import time
from contextlib import suppress
from typing import Any

import pytest

from mini_infer_engine.api.dialects.anthropic.messages_api import MessagesDialect
from mini_infer_engine.api.dialects.base import Dialect
from mini_infer_engine.api.dialects.openai.chat import ChatDialect
from mini_infer_engine.api.dialects.openai.completions import CompletionDialect
from mini_infer_web.api_errors import ApiError, read_json_object
from mini_infer_web.json_structure import MAX_FIELDS, MAX_OBJECTS, MAX_TEXTS, MAX_VALUES, check_structure

LIMIT_S = 0.15
"""Three times the goal, for slower processors."""
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}
VALUES, TEXTS = MAX_VALUES - 100, MAX_TEXTS - 100
FIELDS = {f"k{number}": "x" for number in range(MAX_FIELDS - 200)}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

CASES: dict[str, tuple[Dialect, dict[str, Any]]] = {
    "messages": (ChatDialect(), {"messages": CHAT["messages"] * (MAX_OBJECTS - 10)}),
    "messages that are none": (ChatDialect(), {"messages": [5] * VALUES}),
    "parts": (
        ChatDialect(),
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * (MAX_OBJECTS - 10)}]},
    ),
    "messages of Anthropic's": (
        MessagesDialect(),
        {"model": "m", "max_tokens": 1, "messages": CHAT["messages"] * (MAX_OBJECTS - 10)},
    ),
    "unknown fields": (ChatDialect(), CHAT | FIELDS),
    "unknown fields further in": (ChatDialect(), CHAT | {"stream_options": FIELDS}),
    "unknown fields of a tool": (ChatDialect(), CHAT | {"tools": [TOOL | FIELDS]}),
    "metadata": (ChatDialect(), CHAT | {"metadata": FIELDS}),
    "template's words": (ChatDialect(), CHAT | {"chat_template_kwargs": FIELDS}),
    "biases that are none": (CompletionDialect(), TEXT | {"logit_bias": FIELDS}),
    "biases": (CompletionDialect(), TEXT | {"logit_bias": {str(token): 1 for token in range(20_000)}}),
    "repetition": (CompletionDialect(), TEXT | {"repetition_detection": FIELDS}),
    "stop strings that are none": (CompletionDialect(), TEXT | {"stop": [1] * VALUES}),
    "stop strings": (CompletionDialect(), TEXT | {"stop": ["a"] * TEXTS}),
    "token ids that are none": (CompletionDialect(), TEXT | {"allowed_token_ids": ["1"] * TEXTS}),
    "token ids": (CompletionDialect(), {"prompt": [1] * VALUES}),
    "prompts": (CompletionDialect(), {"prompt": ["a"] * TEXTS}),
    "choices": (ChatDialect(), CHAT | {"structured_outputs": {"choice": ["a"] * TEXTS}}),
    "a schema": (
        ChatDialect(),
        CHAT
        | {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": {"properties": {f"p{i}": {} for i in range(MAX_OBJECTS - 20)}}},
            }
        },
    ),
    "a schema of a tool": (
        ChatDialect(),
        CHAT
        | {
            "tools": [
                TOOL
                | {
                    "function": {
                        "name": "f",
                        "parameters": {
                            "type": "object",
                            "properties": {f"p{i}": {"type": "string"} for i in range(MAX_OBJECTS - 20)},
                        },
                    }
                }
            ]
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_parsing_a_body_is_fast_for_each_admitted_structure(name: str) -> None:
    dialect, body = CASES[name]
    raw = json.dumps(body, separators=(",", ":")).encode()
    await check_structure(raw)  # it is let in
    decoding, parsing = zip(*(seconds(raw, dialect) for _ in range(3)), strict=True)
    assert min(decoding) < LIMIT_S
    assert min(parsing) < LIMIT_S


def seconds(raw: bytes, dialect: Dialect) -> tuple[float, float]:
    """To decode a body, and to make of it what it asks for, or an error."""
    begun_s = time.thread_time()
    body = read_json_object(raw)
    decoded_s = time.thread_time()
    with suppress(ApiError):
        dialect.parse(body)
    return decoded_s - begun_s, time.thread_time() - decoded_s
