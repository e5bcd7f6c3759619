"""A continuation of streams in which a step emits several events, with its token ids in a single event after them.

Events are buffered until their ids arrive, which is at once. What a client has received is therefore always known by
its token ids, and of a step that was lost in the middle it has received nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from mini_infer_gateway.pipeline.continuation.base import Continuation

LONGEST_STEP_BYTES = 4 << 20
"""Longest events of one step that are buffered: an engine that sends more before their token ids cannot be continued.
"""


@dataclass(slots=True)
class BufferedContinuation(Continuation, ABC):
    """The base of continuations that buffer events until their token ids arrive; a subclass knows one API's events."""

    token_ids_fields: ClassVar[bytes] = b',"return_token_ids":true'
    _buffered: list[bytes] = field(default_factory=list)
    """Events whose token ids have not arrived yet."""

    @classmethod
    def of(cls, fields: Mapping[str, Any], seed: int) -> Self:
        """Returns the continuation for a request with these fields. `seed` is used if the client sent none."""
        strips = fields.get("return_token_ids") is not True
        return cls(seed=seed if fields.get("seed") is None else None, strips=strips, returns_usage=False)

    def body(self, body: bytes) -> bytes:
        """Returns the request for the next engine, and drops the buffered events: that engine generates them again."""
        self._buffered.clear()
        return super(BufferedContinuation, self).body(body)

    def take(self, events: bytes) -> bytes:
        """Records each of these events, and returns those that the client receives now."""
        sent: list[bytes] = []
        for event in events.split(b"\n\n"):
            if event:
                self.take_one(event, sent)
        if self._buffered and not self.differs:
            self.possible = self.possible and sum(map(len, self._buffered)) <= LONGEST_STEP_BYTES
            if not self.possible:
                self.release(sent)  # No engine will generate them again.
        return b"".join([event + b"\n\n" for event in sent])

    @abstractmethod
    def release(self, sent: list[bytes]) -> None:
        """Appends all buffered events to `sent`, in the form in which the client receives them."""

    @abstractmethod
    def take_one(self, event: bytes, sent: list[bytes]) -> None:
        """Records one event, and appends to `sent` what the client receives of it and of buffered events."""
