"""What the engine asks of whoever moves keys and values between engines, and what it is told. No sockets, no transport.

A sequence receives in pages of its own: the scheduler gives them to it, and hands it over with `receive`. What is given
to another engine is pinned by the connector, so that a sequence may end while its pages are still being read.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from mini_infer_engine.core.request import Output, Request, TokenLogprobs

if TYPE_CHECKING:
    from mini_infer_engine.core.sequence import Sequence


@dataclass(slots=True, frozen=True)
class KVTransferStats:
    """Counters since the start, but for what is said to hold now."""

    received: int = 0
    """Sequences whose keys and values came from another engine."""
    received_bytes: int = 0
    received_s: float = 0.0
    """Summed, from asking to the last byte."""
    estimated_s: float = 0.0
    """Summed over the same, as it was estimated before."""
    estimate_error_s: float = 0.0
    """Summed absolute differences of the two."""
    given: int = 0
    """Sequences whose keys and values went to another engine."""
    given_bytes: int = 0
    given_s: float = 0.0
    """Summed over writes, from their start to their end."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """Sequences that were computed here after all, by reason."""
    leases_expired: int = 0
    open_leases: int = 0
    """Now: transfers from and to here that are not settled, and prompts kept for others."""
    pinned_pages: int = 0
    """Now: uses of pages by transfers; a page that several transfers pin counts for each of them."""
    bytes_per_s: float = 0.0
    """Of transfers lately; 0: not yet."""
    bytes_per_token: int = 0
    """Of keys and values, in all layers."""
    faults: int = 0
    """Exceptions in the handling of a message, a job or a call: each has cost one peer's message or one job."""
    has_failed: bool = False
    """The transfer thread has ended by a fault: nothing moves any more, and all prompts are computed here."""


NO_TRANSFERS = KVTransferStats()


class LayerProgress(Protocol):
    """Of one pass, whose layers are computed in order."""

    def num_done(self) -> int:
        """Of how many layers keys and values are in the page pool; any thread may ask."""


@dataclass(slots=True, frozen=True)
class Received:
    """Keys and values of a sequence's first `num_tokens` tokens are in its pages."""

    request_id: str
    num_tokens: int
    token_id: int | None = None
    """What follows the known tokens, where the other engine has sampled it."""
    logprobs: Items[TokenLogprobs] = ()
    """Of that token, where they are asked for."""
    num_cached: int = 0
    """Prompt tokens that were in the other engine's prefix cache."""


@dataclass(slots=True, frozen=True)
class NotReceived:
    """Nothing comes for this sequence."""

    request_id: str
    reason: str
    """One of a closed set, for metrics."""
    message: str
    """For people."""


@dataclass(slots=True, frozen=True)
class Work:
    """What other engines want: requests to compute, and ids of those that nobody wants any more."""

    add: list[Request] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    """Ids of the same at the engines that want them: by these, gateways know what they have counted themselves."""
    abort: list[str] = field(default_factory=list)
    came: list[Received | NotReceived] = field(default_factory=list)


class KVConnector(Protocol):
    """Of one engine; its owner is the engine's."""

    falls_back: bool
    """What does not come is computed here; else its request ends with an error."""

    def refuses(self, request: Request) -> str:
        """Why keys and values of this request cannot come from another engine, as a reason; empty: they can."""

    def skip(self, reason: str) -> None:
        """Count a sequence that is computed here instead, for this reason."""

    def receive(self, sequence: "Sequence") -> None:
        """Have another engine fill the pages of a sequence from `num_computed` on; `take` tells how that ended."""

    def cancel(self, sequence: "Sequence") -> None:
        """Nobody waits for what a sequence receives any more. Its pages stay pinned for as long as they may change."""

    def has_news(self, now_s: float) -> bool:
        """Whether `take` has something to tell, or to end."""

    def take(self, now_s: float, prefill_tokens_per_s: float) -> Work:
        """What has happened since the last call, without waiting; the rate is this engine's own, for estimates."""

    def gives(self, sequence: "Sequence") -> bool:
        """Whether what is computed of this sequence goes to another engine that waits for it."""

    def launched(self, sequence: "Sequence", num_tokens: int, layers: LayerProgress) -> None:
        """A pass that makes the first `num_tokens` tokens' keys and values begins; `layers` tells how far it is."""

    def computed(self, sequence: "Sequence", num_tokens: int) -> None:
        """A pass that made the first `num_tokens` tokens' keys and values is done; before its pages can be released."""

    def accept_failed(self, request_id: str, message: str) -> None:
        """A request of another engine, from `take`, cannot be served."""

    def divert(self, outputs: list[Output]) -> list[Output]:
        """Outputs of this engine's own requests; those for other engines are sent on their way.

        Where a request with `holds_kv` has ended, its output tells where its keys and values are.
        """

    def drop(self, request_id: str) -> None:
        """A request with `holds_kv` was aborted."""

    @property
    def stats(self) -> KVTransferStats:
        """Counters."""
