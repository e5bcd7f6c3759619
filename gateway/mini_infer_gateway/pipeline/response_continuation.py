"""The same for a stream of OpenAI's Responses API (see continuation): where its engine died, another goes on.

Engines of ours tell a step's token ids in an event behind the step's own (see held_continuation), which is for the
gateway alone. Ids of items follow from the response's, so that every engine gives them the same; numbers of events do
not, for another engine may cut its steps in other places: they are written anew.
"""

import re
from dataclasses import dataclass

from mini_infer_gateway.pipeline.held_continuation import HeldContinuation

_IDS = re.compile(rb'^event: token_ids\ndata: \{"type":"token_ids","token_ids":\[([\d,]*)\]\}$')
_NUMBER = re.compile(rb'"sequence_number":\d+\}$')
_STARTS = (b"event: response.created\n", b"event: response.in_progress\n")
_ENDS = (b"event: response.completed\n", b"event: response.incomplete\n", b"event: response.failed\n")
_ERROR = b"event: error\n"
_OF_A_STEP = b"event: response."


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
