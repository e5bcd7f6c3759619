"""Continues streams that no engine can resume in the middle: another engine generates them again from their beginning.

These are streams with several choices or prompts, and those that echo their prompt. Seed and output index determine
every token (docs/adr/0005), so the second engine emits the same stream. What the client has received of each choice is
compared by token ids and left out. If the tokens differ, which other batch sizes can cause when two tokens are nearly
equally likely, the stream is not continued.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from mini_infer_gateway.http.upstream import BrokenConnectionError
from mini_infer_gateway.pipeline.continuation.base import (
    DONE,
    ENTRY_BYTES,
    NO_TEXT,
    TOKEN_IDS_FIELD,
    Continuation,
)

_JSON, _HEAD = b"data: {", b"data: "
_UNDIVIDED = b'"logprobs":null'


class _Delta(msgspec.Struct):
    content: str | None = None


class _ChoiceOf(msgspec.Struct):
    index: int
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def content(self) -> str:
        return self.text or (self.delta.content if self.delta else "") or ""


class _Chunk(msgspec.Struct):
    choices: list[_ChoiceOf] = []


@dataclass(slots=True)
class _ChoiceProgress:
    """The state of one choice: what the client has received, and how much of it was emitted again."""

    ids: list[int] = field(default_factory=list)
    characters: int = 0
    empty: int = 0
    """Number of events without tokens, such as the role, after the last of these ids."""
    finished: bool = False
    at: int = 0
    characters_again: int = 0
    empty_again: int = 0

    def begin_again(self) -> None:
        self.at = self.characters_again = self.empty_again = 0


_chunks = msgspec.json.Decoder(_Chunk)


@dataclass(slots=True)
class ReplayedContinuation(Continuation):
    """The state of one stream that another engine can regenerate."""

    choices: int = 1
    _progress: dict[int, _ChoiceProgress] = field(default_factory=dict)

    @classmethod
    def of(cls, fields: Mapping[str, Any], seed: int) -> Self:
        """Returns the continuation for a request with these fields, and computes its number of choices."""
        stream = super(ReplayedContinuation, cls).of(fields, seed)
        prompt, copies = fields.get("prompt"), fields.get("n")
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        stream.choices = (len(prompt) if several and prompt else 1) * (copies if isinstance(copies, int) else 1)
        return stream

    @property
    def progress(self) -> int:
        """A number that grows with each token and each finish reason that the client has received."""
        return sum(len(choice.ids) + choice.finished for choice in self._progress.values()) + self.done

    @property
    def tokens(self) -> int:
        """The number of output tokens that the client has received, over all choices."""
        return sum(len(choice.ids) for choice in self._progress.values())

    def body(self, body: bytes) -> bytes:
        """Returns the request for the next engine, which begins every choice again."""
        for choice in self._progress.values():
            choice.begin_again()
        return super(ReplayedContinuation, self).body(body)

    def take(self, events: bytes) -> bytes:
        """Compares whole events with what the client has received, and returns the new part."""
        sent = []
        for event in events.split(b"\n\n"):
            if event and not self.differs:
                sent += [one + b"\n\n" for one in self._take_one(event)]
        self.done = self.done or (events.endswith(DONE) and not self.differs)
        return b"".join(sent)

    def _take_one(self, event: bytes) -> list[bytes]:
        if not event.startswith(_JSON):
            return [event]
        chunk = _chunks.decode(event[len(_HEAD) :])
        if not chunk.choices:
            was_sent, self.usage_sent = self.usage_sent, True
            return [] if was_sent else [event]
        found = chunk.choices[0]
        if found.token_ids is None:
            self.possible = False  # The client's progress is unknown without them.
            return [event]
        choice = self._progress.setdefault(found.index, _ChoiceProgress())
        return self._new(event, found, found.token_ids, choice)

    def _new(self, event: bytes, found: _ChoiceOf, ids: list[int], choice: _ChoiceProgress) -> list[bytes]:
        """Returns the part of an event that the client has not received."""
        known = choice.ids[choice.at : choice.at + len(ids)]
        if known != ids[: len(known)]:
            self.differs, self.possible = True, False
            return []
        choice.at += len(ids)
        choice.empty_again = 0 if ids else choice.empty_again + 1
        missing = choice.characters - choice.characters_again
        choice.characters_again += len(found.content)
        ends = found.finish_reason is not None and not choice.finished
        if not ends and (choice.at <= len(choice.ids) if ids else self._was_sent(choice, found)):
            return []
        if known or (ends and missing > 0):
            return self._rest(event, found, choice, ids, missing)
        self._note(choice, found, ids)
        return self._shown(event)

    def _was_sent(self, choice: _ChoiceProgress, found: _ChoiceOf) -> bool:
        """True if the client has received this event, which has no tokens."""
        if choice.at < len(choice.ids) or (found.finish_reason is not None and choice.finished):
            return True
        return choice.empty_again <= choice.empty

    def _rest(
        self, event: bytes, found: _ChoiceOf, choice: _ChoiceProgress, ids: list[int], missing: int
    ) -> list[bytes]:
        """Returns the rest of an event that the client has in part: its steps were divided in other places."""
        if _UNDIVIDED not in event or not (found.content or found.text == ""):
            self.differs, self.possible = True, False
            return []
        whole = msgspec.json.decode(event[len(_HEAD) :])
        one = whole["choices"][0]
        rest = found.content[max(0, missing) :]
        new = ids[len(ids) - (choice.at - len(choice.ids)) :] if choice.at > len(choice.ids) else []
        one["token_ids"] = new
        if "text" in one:
            one["text"] = rest
        else:
            one["delta"]["content"] = rest
        self._note(choice, found, new)
        choice.characters += len(rest) - len(found.content)
        return self._shown(_HEAD + msgspec.json.encode(whole))

    def _note(self, choice: _ChoiceProgress, found: _ChoiceOf, new: list[int]) -> None:
        choice.ids += new
        if not self.has_memory(ENTRY_BYTES * len(new)):
            raise BrokenConnectionError("there is no memory left to follow its stream")
        choice.empty = 0 if new else choice.empty + 1
        choice.characters += len(found.content)
        choice.finished = choice.finished or found.finish_reason is not None
        if choice.finished:
            self.finished = sum(one.finished for one in self._progress.values()) == self.choices

    def _shown(self, event: bytes) -> list[bytes]:
        if not self.strips:
            return [event]
        event = TOKEN_IDS_FIELD.sub(b"", event)
        return [] if self.has_text and any(mark in event for mark in NO_TEXT) else [event]
