"""Continues a stream of OpenAI's Responses API on another engine after its engine died (see `base`).

The engines of this project report the token ids of a step in an event after the step's own (see `buffered`);
only the gateway receives it. The ids of items derive from the response's id, so every engine gives them the same ids.
The numbers of events do not, because another engine may divide its steps in other places: they are rewritten.
"""

import re
from dataclasses import dataclass, field

import msgspec

from mini_infer_gateway.http.upstream import BrokenConnectionError
from mini_infer_gateway.pipeline.continuation.base import ENTRY_BYTES
from mini_infer_gateway.pipeline.continuation.buffered import BufferedContinuation

_IDS = re.compile(rb'^event: token_ids\ndata: \{"type":"token_ids","token_ids":\[([\d,]*)\]\}$')
_NUMBER = re.compile(rb'"sequence_number":\d+\}$')
_STARTS = (b"event: response.created\n", b"event: response.in_progress\n")
_ENDS = (b"event: response.completed\n", b"event: response.incomplete\n", b"event: response.failed\n")
_ERROR = b"event: error\n"
_RESPONSE_EVENT = b"event: response."
_TEXT = b"event: response.output_text.delta\n"


class _Logprobs(msgspec.Struct):
    logprobs: list[msgspec.Raw] = []


_logprobs = msgspec.json.Decoder(_Logprobs)


@dataclass(slots=True)
class ResponseContinuation(BufferedContinuation):
    """The state of one stream of the Responses API that another engine can resume."""

    _number: int = 0
    """The number of the next event that the client receives."""

    @property
    def end(self) -> bytes:
        """The empty string: nothing comes after the last event."""
        return b""

    def take_one(self, event: bytes, sent: list[bytes]) -> None:
        """Buffers the events of a step until their token ids arrive, then releases them with consecutive numbers."""
        if found := _IDS.match(event):
            if found[1]:
                self.record(found[1])
            self.release(sent)
            sent += [] if self.strips else [event]
        elif event.startswith(_STARTS):
            # An engine that goes on before the first token id begins anew.
            self._buffered += [event] if event.startswith(_STARTS[self._number : self._number + 1]) else []
            self.release(sent)
        elif event.startswith((*_ENDS, _ERROR)):
            self._buffered.append(event)
            self.release(sent)
            self.finished = self.done = self.done or event.startswith(_ENDS)
        elif event.startswith(_RESPONSE_EVENT):
            self._buffered.append(event)
        else:
            sent.append(event)

    def release(self, sent: list[bytes]) -> None:
        """Appends all buffered events to `sent`, with consecutive numbers if another engine goes on with the stream."""
        for event in self._buffered:
            sent.append(_NUMBER.sub(b'"sequence_number":%d}' % self._number, event) if self._resumed else event)
            self._number += 1
        self._buffered.clear()


@dataclass(slots=True)
class ReplayedResponse(ResponseContinuation):
    """The state of a response with log probabilities: its last events repeat those of all tokens, so it is regenerated.

    `replayed` explains how a stream is regenerated from its beginning.
    """

    _sent_ids: list[int] = field(default_factory=list)
    _at: int = 0
    """Number of these ids that the engine that regenerates the response has emitted."""
    _empty: int = 0
    _empty_again: int = 0
    """Steps without a token after the last id: `_empty` the client has received, `_empty_again` were emitted again."""

    @property
    def progress(self) -> int:
        """A number that grows with each token that the client has received, and at the end."""
        return len(self._sent_ids) + self.finished + self.done

    @property
    def tokens(self) -> int:
        """The number of output tokens that the client has received."""
        return len(self._sent_ids)

    def body(self, body: bytes) -> bytes:
        """Returns the request for the next engine, which begins the response again."""
        self._at = self._empty_again = 0
        return super(ReplayedResponse, self).body(body)

    def take_one(self, event: bytes, sent: list[bytes]) -> None:
        """Compares a step's token ids with those that the client has received, and releases a new step."""
        found = _IDS.match(event)
        if self.differs:
            return
        if not found:
            super(ReplayedResponse, self).take_one(event, sent)
            return
        ids = [int(token) for token in found[1].split(b",") if token]
        known = self._sent_ids[self._at : self._at + len(ids)]
        if known != ids[: len(known)] or (known and len(known) < len(ids) and not self._drop(len(known))):
            self.differs, self.possible = True, False
            return
        self._at += len(ids)
        self._empty_again = 0 if ids else self._empty_again + 1
        if self._at <= len(self._sent_ids) if ids else self._was_sent():
            self._buffered.clear()
            return
        ids = ids[len(known) :]
        self._sent_ids += ids
        if not self.has_memory(ENTRY_BYTES * len(ids)):
            raise BrokenConnectionError("there is no memory left to follow its stream")
        self._empty = 0 if ids else self._empty + 1
        self.release(sent)
        sent += [] if self.strips else [event]

    def _was_sent(self) -> bool:
        """True if the client has received this step, which has no token."""
        return self._at < len(self._sent_ids) or self._empty_again <= self._empty

    def _drop(self, known: int) -> bool:
        """Drops the first `known` tokens from the buffered events. Returns False if no event ends at this token."""
        for position, event in enumerate(self._buffered):
            if known <= 0:
                del self._buffered[:position]
                break
            known -= _tokens_of(event)
        else:
            self._buffered.clear()
        return known == 0


def _tokens_of(event: bytes) -> int:
    """Returns the number of tokens in an event: with log probabilities, text has one entry a token."""
    if not event.startswith(_TEXT):
        return 0
    return len(_logprobs.decode(event.partition(b"\ndata: ")[2]).logprobs)
