"""The same for a stream of OpenAI's Responses API (see continuation): where its engine died, another goes on.

Engines of ours tell a step's token ids in an event behind the step's own (see held_continuation), which is for the
gateway alone. Ids of items follow from the response's, so that every engine gives them the same; numbers of events do
not, for another engine may cut its steps in other places: they are written anew.
"""

import re
from dataclasses import dataclass, field

import msgspec

from mini_infer_gateway.pipeline.held_continuation import HeldContinuation

_IDS = re.compile(rb'^event: token_ids\ndata: \{"type":"token_ids","token_ids":\[([\d,]*)\]\}$')
_NUMBER = re.compile(rb'"sequence_number":\d+\}$')
_STARTS = (b"event: response.created\n", b"event: response.in_progress\n")
_ENDS = (b"event: response.completed\n", b"event: response.incomplete\n", b"event: response.failed\n")
_ERROR = b"event: error\n"
_OF_A_STEP = b"event: response."
_TEXT = b"event: response.output_text.delta\n"


class _Logprobs(msgspec.Struct):
    logprobs: list[msgspec.Raw] = []


_logprobs = msgspec.json.Decoder(_Logprobs)


@dataclass(slots=True)
class ResponseContinuation(HeldContinuation):
    """Of one stream."""

    _number: int = 0
    """Of the next event that is told."""

    @property
    def end(self) -> bytes:
        """Nothing comes after the last event."""
        return b""

    def take_one(self, event: bytes, told: list[bytes]) -> None:
        """See `HeldContinuation`."""
        if found := _IDS.match(event):
            self._ids += [found[1]] if found[1] else []
            self._release(told)
            told += [] if self.strips else [event]
        elif event.startswith(_STARTS):
            # An engine that goes on before the first token id begins anew.
            self._held += [event] if event.startswith(_STARTS[self._number : self._number + 1]) else []
            self._release(told)
        elif event.startswith((*_ENDS, _ERROR)):
            self._held.append(event)
            self._release(told)
            self.finished = self.done = self.done or event.startswith(_ENDS)
        elif event.startswith(_OF_A_STEP):
            self._held.append(event)
        else:
            told.append(event)

    def _release(self, told: list[bytes]) -> None:
        for event in self._held:
            told.append(_NUMBER.sub(b'"sequence_number":%d}' % self._number, event) if self._resumed else event)
            self._number += 1
        self._held.clear()


@dataclass(slots=True)
class ReplayedResponse(ResponseContinuation):
    """Of a response with log probabilities, which its last events tell of all tokens: made again from its beginning.

    See replayed_continuation.
    """

    _told_ids: list[int] = field(default_factory=list)
    _at: int = 0
    """Of these ids, how many the engine that tells them again has told."""
    _empty: int = 0
    _empty_again: int = 0
    """Steps without a token behind the last id: the client has got so many, and the engine has told so many."""

    @property
    def progress(self) -> int:
        """See `Continuation`."""
        return len(self._told_ids) + self.finished + self.done

    def body(self, body: bytes) -> bytes:
        """See `Continuation`."""
        self._at = self._empty_again = 0
        return super(ReplayedResponse, self).body(body)

    def take_one(self, event: bytes, told: list[bytes]) -> None:
        """See `HeldContinuation`."""
        found = _IDS.match(event)
        if self.differs:
            return
        if not found:
            super(ReplayedResponse, self).take_one(event, told)
            return
        ids = [int(token) for token in found[1].split(b",") if token]
        known = self._told_ids[self._at : self._at + len(ids)]
        if known != ids[: len(known)] or (known and len(known) < len(ids) and not self._drop(len(known))):
            self.differs, self.possible = True, False
            return
        self._at += len(ids)
        self._empty_again = 0 if ids else self._empty_again + 1
        if self._at <= len(self._told_ids) if ids else self._was_told():
            self._held.clear()
            return
        ids = ids[len(known) :]
        self._told_ids += ids
        self._empty = 0 if ids else self._empty + 1
        self._release(told)
        told += [] if self.strips else [event]

    def _was_told(self) -> bool:
        """Whether a step without a token was."""
        return self._at < len(self._told_ids) or self._empty_again <= self._empty

    def _drop(self, known: int) -> bool:
        """Drops what of the held events tells the first `known` tokens; False: it cannot be told from the rest."""
        for position, event in enumerate(self._held):
            if known <= 0:
                del self._held[:position]
                break
            known -= _tokens_of(event)
        else:
            self._held.clear()
        return known == 0


def _tokens_of(event: bytes) -> int:
    """How many tokens an event tells: where log probabilities are told, text has one of each."""
    if not event.startswith(_TEXT):
        return 0
    return len(_logprobs.decode(event.partition(b"\ndata: ")[2]).logprobs)
