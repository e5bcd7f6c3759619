"""A continuation of streams in which a step makes several events, and its token ids come in one behind them.

Events are held until their ids have come, which is at once: what a client has got is always known by its token ids, and
of a step that was lost in the middle it has got nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from mini_infer_gateway.pipeline.continuation import Continuation


@dataclass(slots=True)
class HeldContinuation(Continuation, ABC):
    """Of one stream; an API says what each of its events is."""

    asks_for_ids: ClassVar[bytes] = b',"return_token_ids":true'
    _held: list[bytes] = field(default_factory=list)
    """Events whose token ids are still to come."""

    @classmethod
    def of(cls, fields: Mapping[str, Any], seed: int) -> Self:
        """For a request with these fields; `seed` is for where there is none."""
        strips = fields.get("return_token_ids") is not True
        return cls(seed=seed if fields.get("seed") is None else None, strips=strips, wants_usage=False)

    def body(self, body: bytes) -> bytes:
        """See `Continuation`. Events without their ids are made again."""
        self._held.clear()
        return super(HeldContinuation, self).body(body)

    def take(self, events: bytes) -> bytes:
        """See `Continuation`."""
        told: list[bytes] = []
        for event in events.split(b"\n\n"):
            if event:
                self.take_one(event, told)
        return b"".join([event + b"\n\n" for event in told])

    @abstractmethod
    def take_one(self, event: bytes, told: list[bytes]) -> None:
        """Note what one event tells; `told` gets what of it, and of those held before it, the client gets."""
