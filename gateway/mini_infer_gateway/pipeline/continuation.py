"""What is known of one stream, so that another engine can go on with it where its engine died. Pure: bytes in and out.

Engines of ours tell the token ids of each event when asked (`return_token_ids`) and go on after given ones
(`resume_token_ids`): stop strings, unfinished characters, usage and, as the noise is a function of seed and output
index (docs/adr/0005), sampled tokens come out as if nothing had happened. Here the ids are collected and, where the
client did not ask for them, taken out again: what it gets is, byte for byte, what it would have got without.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from mini_infer_apis.dialects.responses import LOGPROBS

DONE = b"data: [DONE]\n\n"

# Quotes inside of JSON strings are escaped, so that no text can look like these.
TOKEN_IDS_FIELD = re.compile(rb',"token_ids":\[([\d,]*)\]')
_IDS, _JSON = b',"token_ids":[', b"data: {"
_FINISH = b'"finish_reason":"'
NO_TEXT = (
    b'"delta":{"content":""},"logprobs":null,"finish_reason":null',
    b'"text":"","logprobs":null,"finish_reason":null',
)
"""A step whose token completed no character: told only to those who asked for token ids."""
_ROLE = b'"delta":{"role":'
"""The first event of a chat."""
_JSON_EVENT = re.compile(rb"(?:^|\n)data: \{")
NO_CHOICE = b'"choices":[]'
"""The usage at the end."""
_CHOICE = b'"choices":[{'
_ERRORS = (b'data: {"error"', b"event: error\n")
_ENDED = re.compile(rb'"code":"(?:engine_dead|engine_error|stopping)"')
"""What an engine of ours says inside of a stream that it cannot go on with, through no fault of the request's."""


def may_outlive_its_engine(fields: Mapping[str, Any]) -> bool:
    """Whether another engine may have part in an answer to this: in a stream that is itself no resumed one."""
    return bool(fields.get("stream")) and "resume_token_ids" not in fields and not fields.get("use_beam_search")


def can_be_continued(fields: Mapping[str, Any]) -> bool:
    """Whether a request's stream can be resumed: one choice, nothing told of its prompt, and not itself a resumed one.

    Log probabilities of output tokens stand in the event of their tokens, and so are told once like these.
    """
    if not may_outlive_its_engine(fields):
        return False
    if any(fields.get(name) not in (None, 1) for name in ("n", "best_of")):
        return False
    if any(fields.get(name) not in (None, False) for name in ("prompt_logprobs", "echo")):
        return False
    if fields.get("include") and LOGPROBS in fields["include"]:
        return False
    prompt = fields.get("prompt", "")
    return isinstance(prompt, str) or (isinstance(prompt, list) and _is_ids(prompt))


def _is_ids(prompt: list[Any]) -> bool:
    return bool(prompt) and all(isinstance(token, int) for token in prompt)


@dataclass(slots=True)
class Continuation:
    """Of one stream."""

    asks_for_ids: ClassVar[bytes] = b',"return_token_ids":true,"return_prompt_token_ids":false'
    seed: int | None
    """To be set; None: the client sent one."""
    strips: bool
    """The client did not ask for token ids."""
    wants_usage: bool
    """The stream ends with an event of its usage."""
    has_text: bool = True
    """Its engines have a tokenizer. Where they have none, steps without text are what the client is told."""
    finished: bool = False
    """Its finish reason was told."""
    done: bool = False
    """It is complete."""
    possible: bool = True
    """All that was told is known by its token ids."""
    differs: bool = False
    """An engine that made it again told other tokens: nobody can go on."""
    usage_told: bool = False
    """The client has got the event of its usage."""
    _ids: list[bytes] = field(default_factory=list)
    _asked: bool = False
    _resumed: bool = False

    @classmethod
    def of(cls, fields: Mapping[str, Any], seed: int) -> Self:
        """For a request with these fields; `seed` is for where there is none."""
        options = fields.get("stream_options")
        return cls(
            seed=seed if fields.get("seed") is None else None,
            strips=fields.get("return_token_ids") is not True,
            wants_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        )

    @property
    def end(self) -> bytes:
        """What ends a stream whose finish reason was told."""
        return DONE

    @property
    def progress(self) -> int:
        """Grows with each step that the client was told of."""
        return len(self._ids) + self.finished + self.done

    def body(self, body: bytes) -> bytes:
        """The request for the next engine; `body` is the client's JSON object. Of a key sent twice the last counts."""
        added = b""
        if self.seed is not None:
            added += b',"seed":%d' % self.seed
        if self.strips:
            added += self.asks_for_ids
        if self._ids:
            added += b',"resume_token_ids":[' + b",".join(self._ids) + b"]"
        self._resumed = self._asked
        self._asked = True
        body = body.rstrip()
        return body[:-1] + added + body[-1:]

    def take(self, events: bytes) -> bytes:
        """Notes what whole events tell; returns what of them the client gets."""
        if self.strips and not self._resumed and events.find(b"\n\n") == len(events) - 2 and events.startswith(_JSON):
            start = events.rfind(_IDS)
            if start >= 0:
                return self._take_step(events, start)
        told = TOKEN_IDS_FIELD.findall(events)
        self._ids += [ids for ids in told if ids]
        # An engine that tells no ids may have told text: nobody could go on after it.
        self.possible = self.possible and len(told) == len(_JSON_EVENT.findall(events)) - events.count(NO_CHOICE)
        if self._resumed:
            events = _without(events, _ROLE)
        if self._resumed and self.finished:
            events = _without(events, _CHOICE)  # It has been told how the choice ended.
        self.finished = self.finished or _FINISH in events
        if self.usage_told:
            events = _without(events, NO_CHOICE)
        self.usage_told = self.usage_told or NO_CHOICE in events
        self.done = self.done or events.endswith(DONE)
        if not self.strips:
            return events
        events = TOKEN_IDS_FIELD.sub(b"", events)
        for mark in NO_TEXT if self.has_text else ():
            events = _without(events, mark)
        return events

    def _take_step(self, event: bytes, start: int) -> bytes:
        """The same for a lone event with ids, which begin at `start`: nearly all are such, so it is made short."""
        end = event.index(b"]", start)
        ids = event[start + len(_IDS) : end]
        if ids:
            self._ids.append(ids)
        event = event[:start] + event[end + 1 :]
        self.finished = self.finished or _FINISH in event
        has_none = NO_TEXT[0] in event or NO_TEXT[1] in event
        return b"" if has_none and self.has_text else event


def split_engine_death(events: bytes) -> tuple[bytes, bool]:
    """Whole events up to the one that says that the engine cannot go on, and whether there is one."""
    found = [position for mark in _ERRORS if (position := events.find(mark)) >= 0]
    if not found or not _ENDED.search(events, min(found)):
        return events, False
    return events[: min(found)], True


def _without(events: bytes, mark: bytes) -> bytes:
    """Without the events that hold `mark`."""
    if mark not in events:
        return events
    return b"".join(event + b"\n\n" for event in events.split(b"\n\n")[:-1] if mark not in event)
