"""Continues a stream of Anthropic's Messages API on another engine after its engine died (see `continuation`).

The engines of this project report the token ids of a step in a `ping` after its events (see `held_continuation`).
"""

import re
from dataclasses import dataclass

from mini_infer_gateway.pipeline.held_continuation import HeldContinuation

_IDS = re.compile(rb'^event: ping\ndata: \{"type":"ping","token_ids":\[([\d,]*)\]\}$')
_START, _PING = b"event: message_start\n", b"event: ping\n"
_DELTA, _STOP = b"event: message_delta\n", b"event: message_stop\n"
_OF_A_STEP = b"event: content_block_"


@dataclass(slots=True)
class MessageContinuation(HeldContinuation):
    """The state of one stream of the Messages API that another engine can resume."""

    _begun: bool = False
    """True once the client has received the beginning of the message."""

    @property
    def end(self) -> bytes:
        """The event that ends a stream whose `message_delta` the client has received."""
        return b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

    def take_one(self, event: bytes, told: list[bytes]) -> None:
        """Buffers the events of a step until their `ping`, and drops a second beginning of the message."""
        if event.startswith(_OF_A_STEP):
            self._held.append(event)
        elif found := _IDS.match(event):
            self._ids += [found[1]] if found[1] else []
            told += self._released() if self.strips else [*self._released(), event]
        elif event.startswith(_DELTA):
            if not self.finished:
                told += [*self._released(), event]
            self.finished = True
            self._held.clear()
        elif event.startswith(_STOP):
            told.append(event)
            self.done = True
        elif event.startswith(_START):
            told += [] if self._begun else [event]
            self._begun = True
        elif not (self._resumed and event.startswith(_PING)):
            told.append(event)

    def _released(self) -> list[bytes]:
        held, self._held = self._held, []
        return held
