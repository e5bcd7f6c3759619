"""Adapts conversations to chat templates in harmony, the format of gpt-oss, which read less than clients send.

The published template shows reasoning from the field `thinking`, one call of a message, results under the name of the
call before them, and instructions from the first message alone. Knows no tokens.
"""

from collections.abc import Sequence
from typing import Any

from mini_infer_web.api_errors import refuse_field

Message = dict[str, Any]

_MARK = "<|channel|>analysis<|message|>"
_INSTRUCTIONS = ("system", "developer")
_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts that gpt-oss was not trained on, and the nearest one that it was."""


def is_harmony(source: str) -> bool:
    """True if a chat template writes harmony's messages."""
    return _MARK in source


def harmony_effort(effort: str) -> str:
    """Returns the effort that a template in harmony is given: low, medium or high. Raises ApiError 400 for none."""
    if effort == "none":
        refuse_field("reasoning_effort", "is none, and this model always reasons: send low, medium or high")
    return _EFFORTS.get(effort, effort)


def harmony_messages(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages so that a template in harmony shows all of them; contents must be strings.

    All instructions are one message at the front. An assistant's message has its reasoning as `thinking`, and at most
    one call, which the results of that call follow.
    """
    turns: list[Message] = []
    rest = _with_instructions_first(messages)
    for index, message in enumerate(rest):
        if message["role"] == "tool" and _is_moved(rest, index):
            continue
        if message["role"] == "assistant":
            turns += _assistant_turns(message, _results_after(rest, index))
        else:
            turns.append(message)
    return turns


def _with_instructions_first(messages: Sequence[Message]) -> list[Message]:
    """Joins instructions, unless they are one message at the front."""
    if all(message["role"] not in _INSTRUCTIONS for message in messages[1:]):
        return list(messages)
    texts = [message["content"] for message in messages if message["role"] in _INSTRUCTIONS and message["content"]]
    others = [message for message in messages if message["role"] not in _INSTRUCTIONS]
    return [{"role": "developer", "content": "\n\n".join(texts)}, *others]


def _results_after(messages: Sequence[Message], index: int) -> list[Message]:
    """Returns the results that stand behind the message of this index, up to one of another role."""
    end = index + 1
    while end < len(messages) and messages[end]["role"] == "tool":
        end += 1
    return list(messages[index + 1 : end])


def _is_moved(messages: Sequence[Message], index: int) -> bool:
    """True if the result of this index belongs to a message of several calls, each of which its results follow."""
    while index >= 0 and messages[index]["role"] == "tool":
        index -= 1
    return index >= 0 and len(messages[index].get("tool_calls", ())) > 1


def _assistant_turns(message: Message, results: Sequence[Message]) -> list[Message]:
    """Returns an assistant's message for each of its calls; if there are several, with the results behind them."""
    calls = message.get("tool_calls", ())
    message = _with_thinking(message)
    if len(calls) < 2:
        return [message]
    turns: list[Message] = []
    left = list(results)
    for number, call in enumerate(calls):
        texts = message if number == 0 else {"role": "assistant", "content": ""}
        own = [result for result in left if result.get("tool_call_id") == call.get("id")]
        left = [result for result in left if result.get("tool_call_id") != call.get("id")]
        turns += [{**texts, "tool_calls": [call]}, *own]
    return turns + left


def _with_thinking(message: Message) -> Message:
    """Returns an assistant's message with `thinking`. Beside a call, the template refuses content in addition to it:
    that is shown behind the reasoning, as the template shows content that stands alone.
    """
    thinking = message.get("reasoning") or message.get("thinking")
    if not thinking:
        return message
    if message.get("tool_calls") and message["content"]:
        return message | {"thinking": f"{thinking}\n{message['content']}", "content": ""}
    return message | {"thinking": thinking}
