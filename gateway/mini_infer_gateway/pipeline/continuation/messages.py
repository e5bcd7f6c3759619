"""Continues a stream of Anthropic's Messages API on another engine after its engine died (see `base`).

The engines of this project report the token ids of a step in a `ping` after its events (see `buffered`).
"""

import re
from dataclasses import dataclass

from mini_infer_gateway.pipeline.continuation.buffered import BufferedContinuation

_IDS = re.compile(rb'^event: ping\ndata: \{"type":"ping","token_ids":\[([\d,]*)\]\}$')
_START, _PING = b"event: message_start\n", b"event: ping\n"
_DELTA, _STOP = b"event: message_delta\n", b"event: message_stop\n"
_CONTENT_BLOCK = b"event: content_block_"


@dataclass(slots=True)
class MessageContinuation(BufferedContinuation):
    """The state of one stream of the Messages API that another engine can resume."""

    _begun: bool = False
    """True once the client has received the beginning of the message."""

    @property
    def end(self) -> bytes:
        """The event that ends a stream whose `message_delta` the client has received."""
        return b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

    def take_one(self, event: bytes, sent: list[bytes]) -> None:
        """Buffers the events of a step until their `ping`, and drops a second beginning of the message."""
        if event.startswith(_CONTENT_BLOCK):
            self._buffered.append(event)
        elif found := _IDS.match(event):
            if found[1]:
                self.record(found[1])
            sent += self._released() if self.strips else [*self._released(), event]
        elif event.startswith(_DELTA):
            if not self.finished:
                sent += [*self._released(), event]
            self.finished = True
            self._buffered.clear()
        elif event.startswith(_STOP):
            sent.append(event)
            self.done = True
        elif event.startswith(_START):
            sent += [] if self._begun else [event]
            self._begun = True
        elif not (self._resumed and event.startswith(_PING)):
            sent.append(event)

    def release(self, sent: list[bytes]) -> None:
        """Appends all buffered events to `sent`."""
        sent += self._released()

    def _released(self) -> list[bytes]:
        released, self._buffered = self._buffered, []
        return released
