"""Emits the output of a response, item by item, and the events of each. Knows no request, no usage and no end.

Events are those of OpenAI's Responses API, https://platform.openai.com/docs/api-reference/responses-streaming: an item
begins and ends, and so does a part in it; between are deltas. One item is open at a time.
"""

import json
from abc import ABC, abstractmethod
from typing import Any

from mini_infer_apis.dialects.response_items import CUSTOM_INPUT, sealed_reasoning
from mini_infer_apis.dialects.response_object import (
    CALL_PREFIX,
    CUSTOM_CALL_PREFIX,
    MESSAGE_PREFIX,
    REASONING_PREFIX,
    id_in,
)
from mini_infer_engine.api.dialects.openai.shapes import encode_json, obfuscation

Logprobs = list[dict[str, Any]]
_CALL_ID_CHARACTERS = 24


class EventWriter:
    """Writes the events of one stream, numbered, and the ids in them."""

    def __init__(self, response_id: str, *, obfuscates: bool = False) -> None:
        """If `obfuscates`, deltas have random characters, so that their lengths reveal little of their text."""
        self._response_id = response_id
        self._obfuscates = obfuscates
        self._number = 0

    def id_of(self, prefix: str, output_index: int) -> str:
        """Returns the id of an item, which is the same at every engine that goes on with the response."""
        return id_in(self._response_id, prefix, output_index)

    def call_id_of(self, output_index: int) -> str:
        """Returns the id of a call, by which its result is sent."""
        return id_in(self._response_id, "call_", output_index, _CALL_ID_CHARACTERS)

    def restart(self) -> None:
        """Resets the numbers: the events written so far are not sent."""
        self._number = 0

    def write(self, kind: str, **fields: Any) -> bytes:
        """Returns one event as bytes."""
        content = {"type": kind, **fields, "sequence_number": self._number}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_json(content))

    def write_delta(self, head: bytes, delta: str, tail: bytes = b"") -> bytes:
        """Returns a delta's event, whose beginning was encoded before (`delta_head`): one such is sent a token."""
        number, self._number = self._number, self._number + 1
        begin = b'%b,"delta":%b%b' % (head, encode_json(delta), tail)
        end = b',"sequence_number":%d}\n\n' % number
        return begin + (obfuscation(len(begin) + len(end)) if self._obfuscates else b"") + end


def ids_event(token_ids: list[int]) -> bytes:
    """Returns an event with the token ids of the events before it since the last of its kind; it has no number."""
    return b"event: token_ids\ndata: %b\n\n" % encode_json({"type": "token_ids", "token_ids": token_ids})


def delta_head(kind: str, **fields: Any) -> bytes:
    """Returns the beginning of an item's delta events."""
    return b"event: %b\ndata: %b" % (kind.encode(), encode_json({"type": kind, **fields})[:-1])


class OutputItem(ABC):
    """An item that is being written."""

    id_prefix: str

    def __init__(self, events: EventWriter, output_index: int) -> None:
        self.id = events.id_of(self.id_prefix, output_index)
        self._events = events
        self._where: dict[str, Any] = {"item_id": self.id, "output_index": output_index}
        self._output_index = output_index
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All of the text so far."""
        return "".join(self._pieces)

    def begin(self) -> bytes:
        """Returns the events before the first delta."""
        return self._events.write(
            "response.output_item.added", output_index=self._output_index, item=self.shown("in_progress")
        )

    def push(self, text: str, logprobs: Logprobs) -> bytes:
        """Adds a piece of text and returns its events."""
        self._pieces.append(text)
        return self._delta(text, logprobs)

    def end(self, status: str) -> bytes:
        """Returns the events after the last delta."""
        return self._events.write("response.output_item.done", output_index=self._output_index, item=self.shown(status))

    @abstractmethod
    def shown(self, status: str) -> dict[str, Any]:
        """Returns the item as answers have it."""

    @abstractmethod
    def _delta(self, text: str, logprobs: Logprobs) -> bytes:
        """Returns the event of a piece."""


class MessageItem(OutputItem):
    """The item of the model's answer."""

    id_prefix = MESSAGE_PREFIX

    def __init__(self, events: EventWriter, output_index: int) -> None:
        super().__init__(events, output_index)
        self._where["content_index"] = 0
        self._head = delta_head("response.output_text.delta", **self._where)
        self._logprobs: Logprobs = []

    def begin(self) -> bytes:
        """Returns the events that begin an item and its one part."""
        part = self._part("", [])
        return super().begin() + self._events.write("response.content_part.added", **self._where, part=part)

    def add_logprobs(self, logprobs: Logprobs) -> None:
        """Adds the log probabilities of a token that no delta has sent, since only its beginning is in the text."""
        self._logprobs += logprobs

    def _delta(self, text: str, logprobs: Logprobs) -> bytes:
        self._logprobs += logprobs
        return self._events.write_delta(self._head, text, b',"logprobs":' + encode_json(logprobs))

    def end(self, status: str) -> bytes:
        """Returns the events that end the part and the item."""
        text, logprobs = self.text, self._logprobs
        done = self._events.write("response.output_text.done", **self._where, text=text, logprobs=logprobs)
        part = self._events.write("response.content_part.done", **self._where, part=self._part(text, logprobs))
        return done + part + super().end(status)

    def shown(self, status: str) -> dict[str, Any]:
        """Returns the message with its text and log probabilities."""
        content = [] if status == "in_progress" else [self._part(self.text, self._logprobs)]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _part(self, text: str, logprobs: Logprobs) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class ReasoningItem(OutputItem):
    """The item of the model's reasoning, as `content`."""

    id_prefix = REASONING_PREFIX

    def __init__(self, events: EventWriter, output_index: int, *, sealed: bool) -> None:
        """If `sealed`, the item also has `encrypted_content`."""
        super().__init__(events, output_index)
        self._where["content_index"] = 0
        self._head = delta_head("response.reasoning_text.delta", **self._where)
        self._sealed = sealed

    def begin(self) -> bytes:
        """Returns the events that begin an item and its one part."""
        part = {"type": "reasoning_text", "text": ""}
        return super().begin() + self._events.write("response.content_part.added", **self._where, part=part)

    def _delta(self, text: str, logprobs: Logprobs) -> bytes:
        return self._events.write_delta(self._head, text)

    def end(self, status: str) -> bytes:
        """Returns the events that end the part and the item."""
        text = self._events.write("response.reasoning_text.done", **self._where, text=self.text)
        part = {"type": "reasoning_text", "text": self.text}
        return text + self._events.write("response.content_part.done", **self._where, part=part) + super().end(status)

    def shown(self, status: str) -> dict[str, Any]:
        """Returns the item with the reasoning in `content`."""
        content = [] if status == "in_progress" else [{"type": "reasoning_text", "text": self.text}]
        return self._item(status, [], content)

    def _item(self, status: str, summary: list[dict[str, str]], content: list[dict[str, str]]) -> dict[str, Any]:
        item = {"id": self.id, "type": "reasoning", "status": status, "summary": summary, "content": content}
        is_sealed = self._sealed and status != "in_progress"
        return item | ({"encrypted_content": sealed_reasoning(self.text)} if is_sealed else {})


class ReasoningSummaryItem(ReasoningItem):
    """The item of the model's reasoning, as `summary`: for clients that request one, and show only that."""

    def __init__(self, events: EventWriter, output_index: int, *, sealed: bool) -> None:
        """If `sealed`, the item also has `encrypted_content`."""
        super().__init__(events, output_index, sealed=sealed)
        del self._where["content_index"]
        self._where["summary_index"] = 0
        self._head = delta_head("response.reasoning_summary_text.delta", **self._where)

    def begin(self) -> bytes:
        """Returns the events that begin an item and its one part."""
        item = OutputItem.begin(self)
        return item + self._events.write("response.reasoning_summary_part.added", **self._where, part=self._part(""))

    def end(self, status: str) -> bytes:
        """Returns the events that end the part and the item."""
        text = self._events.write("response.reasoning_summary_text.done", **self._where, text=self.text)
        part = self._events.write("response.reasoning_summary_part.done", **self._where, part=self._part(self.text))
        return text + part + OutputItem.end(self, status)

    def shown(self, status: str) -> dict[str, Any]:
        """Returns the item with the reasoning in `summary`."""
        return self._item(status, [] if status == "in_progress" else [self._part(self.text)], [])

    def _part(self, text: str) -> dict[str, str]:
        return {"type": "summary_text", "text": text}


class FunctionCallItem(OutputItem):
    """The item of a call of a function."""

    id_prefix = CALL_PREFIX

    def __init__(self, events: EventWriter, output_index: int, name: str, namespace: str | None = None) -> None:
        super().__init__(events, output_index)
        self._call_id, self._name = events.call_id_of(output_index), name
        self._of_namespace = {} if namespace is None else {"namespace": namespace}
        self._head = delta_head("response.function_call_arguments.delta", **self._where)

    def _delta(self, text: str, logprobs: Logprobs) -> bytes:
        return self._events.write_delta(self._head, text)

    def end(self, status: str) -> bytes:
        """Returns the events that end the arguments and the item."""
        fields = {"arguments": self.text, "name": self._name}
        return self._events.write("response.function_call_arguments.done", **self._where, **fields) + super().end(
            status
        )

    def shown(self, status: str) -> dict[str, Any]:
        """Returns the call with its name and arguments."""
        call = {"call_id": self._call_id, "name": self._name, "arguments": self.text} | self._of_namespace
        return {"id": self.id, "type": "function_call", "status": status} | call


class CustomCallItem(OutputItem):
    """The item of a call of a custom tool, which the model makes as a function with one string: sent when that is
    whole.
    """

    id_prefix = CUSTOM_CALL_PREFIX

    def __init__(self, events: EventWriter, output_index: int, name: str) -> None:
        super().__init__(events, output_index)
        self._call_id, self._name = events.call_id_of(output_index), name

    def _delta(self, text: str, logprobs: Logprobs) -> bytes:
        return b""

    def end(self, status: str) -> bytes:
        """Returns the events of the input and of the item's end."""
        head = delta_head("response.custom_tool_call_input.delta", **self._where)
        delta = self._events.write_delta(head, self._input)
        done = self._events.write("response.custom_tool_call_input.done", **self._where, input=self._input)
        return delta + done + super().end(status)

    @property
    def _input(self) -> str:
        """The one string; all of the arguments if they are cut off, or something else."""
        try:
            value = json.loads(self.text)[CUSTOM_INPUT]
        except (ValueError, KeyError, TypeError, RecursionError):
            return self.text
        return value if isinstance(value, str) else self.text

    def shown(self, status: str) -> dict[str, Any]:
        """Returns the call with its name and input."""
        value = "" if status == "in_progress" else self._input
        call = {"call_id": self._call_id, "name": self._name, "input": value}
        return {"id": self.id, "type": "custom_tool_call", "status": status} | call
