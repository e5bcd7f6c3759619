"""Records the state of one stream, so that another engine can continue it after its engine died. Pure: bytes in, bytes
out.

The engines of this project report the token ids of each event if a request sets `return_token_ids`, and continue after
given ids (`resume_token_ids`). Stop strings, incomplete characters, usage and sampled tokens come out as if nothing had
happened, because the noise is a function of seed and output index (docs/adr/0005). This module collects the ids and
removes them again if the client did not request them: the client receives, byte for byte, what it would have received
without them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self

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
"""Marks of a step whose token completed no character: only clients that request token ids receive its event."""
_ROLE = b'"delta":{"role":'
"""Mark of the first event of a chat."""
_JSON_EVENT = re.compile(rb"(?:^|\n)data: \{")
NO_CHOICE = b'"choices":[]'
"""Mark of the usage event at the end."""
_CHOICE = b'"choices":[{'
_ERRORS = (b'data: {"error"', b"event: error\n")
_ENDED = re.compile(rb'"code":"(?:engine_dead|engine_error|stopping)"')
"""Matches an in-stream error by which our engines report that they cannot continue, through no fault of the request."""


ENTRY_BYTES = 64
"""Bytes of memory of a step's token ids beyond their length."""
RESERVED_AT_ONCE_BYTES = 64 << 10


def _anything(more_bytes: int) -> bool:
    return True


def may_outlive_its_engine(fields: Mapping[str, Any]) -> bool:
    """True if another engine may contribute to the answer: it is a stream, and not itself a resumed one."""
    return bool(fields.get("stream")) and "resume_token_ids" not in fields and not fields.get("use_beam_search")


def can_be_continued(fields: Mapping[str, Any]) -> bool:
    """True if a request's stream can be resumed: it has one choice, reports nothing of its prompt, and is not itself
    resumed.

    Log probabilities of output tokens are in the events of their tokens, and so are sent exactly once, as the tokens
    are.
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
    """The state of one stream that another engine can resume after its last token."""

    token_ids_fields: ClassVar[bytes] = b',"return_token_ids":true,"return_prompt_token_ids":false'
    """Fields of a body by which a client requests the token ids."""
    seed: int | None
    """The seed to set; None if the client sent one."""
    strips: bool
    """True if token ids are removed from the stream because the client did not request them."""
    returns_usage: bool
    """True if the stream ends with a usage event."""
    has_text: bool = True
    """True if the engines have a tokenizer. Without one, the client receives also the steps that have no text."""
    finished: bool = False
    """True once the client has received the finish reason."""
    done: bool = False
    """True once the stream is complete."""
    possible: bool = True
    """True while everything that the client has received is known by its token ids."""
    differs: bool = False
    """True if an engine that regenerated the stream produced other tokens: no engine can continue it."""
    usage_sent: bool = False
    """True once the client has received the usage event."""
    reserve: Callable[[int], bool] = _anything
    """Reserves memory for the state; returns False if there is none, and no engine can continue the stream then."""
    _unreserved_bytes: int = 0
    _ids: list[bytes] = field(default_factory=list)
    _requested: bool = False
    """True once a request was written for an engine."""
    _resumed: bool = False
    """True if another engine has continued the stream."""
    _tokens: int = 0
    """Number of tokens in the first `_counted` of the ids."""
    _counted: int = 0

    @classmethod
    def of(cls, fields: Mapping[str, Any], seed: int) -> Self:
        """Returns the continuation for a request with these fields. `seed` is used if the client sent none."""
        options = fields.get("stream_options")
        return cls(
            seed=seed if fields.get("seed") is None else None,
            strips=fields.get("return_token_ids") is not True,
            returns_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        )

    @property
    def end(self) -> bytes:
        """The bytes that end a stream whose finish reason the client has received."""
        return DONE

    @property
    def progress(self) -> int:
        """A number that grows with each step that the client has received."""
        return len(self._ids) + self.finished + self.done

    @property
    def tokens(self) -> int:
        """The number of output tokens that the client has received."""
        for ids in self._ids[self._counted :]:
            self._tokens += 1 + ids.count(b",")
        self._counted = len(self._ids)
        return self._tokens

    def record(self, ids: bytes) -> None:
        """Records the token ids of a step, as long as there is memory for them."""
        if not self.possible:
            self._tokens += 1 + ids.count(b",")
            return
        self._ids.append(ids)
        if not self.has_memory(len(ids) + ENTRY_BYTES):
            self._tokens = self.tokens
            self._ids, self._counted, self.possible = [], 0, False

    def has_memory(self, more_bytes: int) -> bool:
        """Counts memory that the state takes, and returns False if there is none for it."""
        self._unreserved_bytes += more_bytes
        if self._unreserved_bytes < RESERVED_AT_ONCE_BYTES:
            return True
        reserved, self._unreserved_bytes = self._unreserved_bytes, 0
        return self.reserve(reserved)

    def body(self, body: bytes) -> bytes:
        """Returns the request for the next engine: `body`, the client's JSON object, with fields added at its end."""
        added = b""
        if self.seed is not None:
            added += b',"seed":%d' % self.seed
        if self.strips:
            added += self.token_ids_fields
        if self._ids:
            added += b',"resume_token_ids":[' + b",".join(self._ids) + b"]"
        self._resumed = self._requested
        self._requested = True
        body = body.rstrip()
        return body[:-1] + added + body[-1:]

    def take(self, events: bytes) -> bytes:
        """Records what whole events report, and returns the part of them that goes to the client."""
        if self.strips and not self._resumed and events.find(b"\n\n") == len(events) - 2 and events.startswith(_JSON):
            start = events.rfind(_IDS)
            if start >= 0:
                return self._take_step(events, start)
        reported = TOKEN_IDS_FIELD.findall(events)
        for ids in reported:
            if ids:
                self.record(ids)
        # An engine that reports no ids may have sent text: no engine could continue after it.
        self.possible = self.possible and len(reported) == len(_JSON_EVENT.findall(events)) - events.count(NO_CHOICE)
        if self._resumed:
            events = _without(events, _ROLE)
        if self._resumed and self.finished:
            events = _without(events, _CHOICE)  # The client has received the finish reason.
        self.finished = self.finished or _FINISH in events
        if self.usage_sent:
            events = _without(events, NO_CHOICE)
        self.usage_sent = self.usage_sent or NO_CHOICE in events
        self.done = self.done or events.endswith(DONE)
        if not self.strips:
            return events
        events = TOKEN_IDS_FIELD.sub(b"", events)
        for mark in NO_TEXT if self.has_text else ():
            events = _without(events, mark)
        return events

    def _take_step(self, event: bytes, start: int) -> bytes:
        """Takes a lone event whose ids begin at `start`. Nearly all events are such, so this path is short."""
        end = event.index(b"]", start)
        ids = event[start + len(_IDS) : end]
        if ids:
            self.record(ids)
        event = event[:start] + event[end + 1 :]
        self.finished = self.finished or _FINISH in event
        has_none = NO_TEXT[0] in event or NO_TEXT[1] in event
        return b"" if has_none and self.has_text else event


@dataclass(slots=True)
class NoContinuation(Continuation):
    """The null object of an answer that no other engine can continue: it changes nothing and records nothing."""

    possible: bool = False

    def body(self, body: bytes) -> bytes:
        """Returns `body` unchanged."""
        return body

    def take(self, events: bytes) -> bytes:
        """Returns `events` unchanged."""
        return events


NO_CONTINUATION: Final = NoContinuation(seed=None, strips=False, returns_usage=False)


def split_engine_death(events: bytes) -> tuple[bytes, bool]:
    """Returns the events before one that reports the engine's end, and True if there is such an event."""
    found = [position for mark in _ERRORS if (position := events.find(mark)) >= 0]
    if not found or not _ENDED.search(events, min(found)):
        return events, False
    return events[: min(found)], True


def _without(events: bytes, mark: bytes) -> bytes:
    """Returns the events that do not contain `mark`."""
    if mark not in events:
        return events
    return b"".join(event + b"\n\n" for event in events.split(b"\n\n")[:-1] if mark not in event)
