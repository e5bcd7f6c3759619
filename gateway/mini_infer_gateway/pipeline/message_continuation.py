"""The same for a stream of Anthropic's Messages API (see continuation): where its engine died, another goes on.

What a step makes is several events, and engines of ours tell the step's token ids in one more, a `ping` behind them. So
events are held until their ids have come, which is at once: what a client has got is always known by its token ids, and
of a step that was lost in the middle it has got nothing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mini_infer_gateway.pipeline.continuation import Continuation

_IDS = re.compile(rb'^event: ping\ndata: \{"type":"ping","token_ids":\[([\d,]*)\]\}$')
_START, _PING = b"event: message_start\n", b"event: ping\n"
_DELTA, _STOP = b"event: message_delta\n", b"event: message_stop\n"
_OF_A_STEP = b"event: content_block_"


@dataclass(slots=True)
class MessageContinuation(Continuation):
    """Of one stream."""

    asks_for_ids: ClassVar[bytes] = b',"return_token_ids":true'
    _held: list[bytes] = field(default_factory=list)
    """Events whose token ids are still to come."""
    _begun: bool = False
    """The client has the message's beginning."""

    @classmethod
    def of(cls, fields: Mapping[str, Any], seed: int) -> "MessageContinuation":
        """For a request with these fields; `seed` is for where there is none."""
        strips = fields.get("return_token_ids") is not True
        return cls(seed=seed if fields.get("seed") is None else None, strips=strips, wants_usage=False)

    @property
    def end(self) -> bytes:
        """What ends a stream whose `message_delta` was told."""
        return b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

    def body(self, body: bytes) -> bytes:
        """See `Continuation`. Events without their ids are made again."""
        self._held.clear()
        return super(MessageContinuation, self).body(body)

    def take(self, events: bytes) -> bytes:
        """See `Continuation`."""
        told: list[bytes] = []
        for event in events.split(b"\n\n"):
            if event:
                self._take_one(event, told)
        return b"".join([event + b"\n\n" for event in told])

    def _take_one(self, event: bytes, told: list[bytes]) -> None:
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
