"""Defines the engine's interface to the component that moves keys and values between engines. No sockets, no transport.

A sequence receives into pages of its own: the scheduler allocates them and passes the sequence to `receive`. The
connector pins pages that another engine reads, so that a sequence may end while its pages are still being read.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from mini_infer_engine.core.request import Output, Request, TokenLogprobs

if TYPE_CHECKING:
    from mini_infer_engine.core.sequence import Sequence


@dataclass(slots=True, frozen=True)
class KVTransferStats:
    """Counters since the start, except for fields that are said to hold now."""

    received: int = 0
    """Sequences whose keys and values came from another engine."""
    received_bytes: int = 0
    received_s: float = 0.0
    """Seconds from request to last byte, summed over received sequences."""
    estimated_s: float = 0.0
    """Estimates of `received_s` that were made in advance, summed over the same sequences."""
    estimate_error_s: float = 0.0
    """Summed absolute differences between received and estimated seconds."""
    sent: int = 0
    """Sequences whose keys and values went to another engine."""
    sent_bytes: int = 0
    sent_s: float = 0.0
    """Seconds from start to end of writes, summed."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """Sequences that were computed here after all, by reason."""
    mismatches: dict[str, int] = field(default_factory=dict)
    """Transfers to here whose digest was wrong, by the address of the engine that sent them."""
    leases_expired: int = 0
    open_leases: int = 0
    """Gauge: transfers from and to here that are not settled, and prompts retained for other engines."""
    pinned_pages: int = 0
    """Gauge: uses of pages by transfers; a page that several transfers pin counts once for each of them."""
    bytes_per_s: float = 0.0
    """Gauge: bandwidth of recent transfers; 0 before any was measured."""
    bytes_per_token: int = 0
    """Bytes of one token's keys and values, in all layers."""
    faults: int = 0
    """Exceptions in the handling of a message, a job or a call: each has cost one peer's message or one job."""
    has_failed: bool = False
    """True if the transfer thread has ended by a fault: nothing moves any more, and all prompts are computed here."""


NO_TRANSFERS = KVTransferStats()


class LayerProgress(Protocol):
    """The progress of one pass, whose layers are computed in order."""

    def num_done(self) -> int:
        """Returns the number of layers whose keys and values are in the page pool. Any thread may call it."""


@dataclass(slots=True, frozen=True)
class Received:
    """Event: keys and values of a sequence's first `num_tokens` tokens are in its pages."""

    request_id: str
    num_tokens: int
    token_id: int | None = None
    """The token after the known ones, if the other engine has sampled it."""
    logprobs: Items[TokenLogprobs] = ()
    """Log probabilities at that token, if requested."""
    num_cached: int = 0
    """Prompt tokens that were in the other engine's prefix cache."""


@dataclass(slots=True, frozen=True)
class NotReceived:
    """Event: nothing comes for this sequence."""

    request_id: str
    reason: str
    """One of a closed set of reasons, for metrics."""
    message: str
    """Explanation for people."""


@dataclass(slots=True, frozen=True)
class Work:
    """Requests of other engines: prompts to compute, ids to abort, and transfers to this engine that have ended."""

    add: list[Request] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    """Ids that the `add` requests have at the requesting engines: gateways recognise by them what they have counted
    already.
    """
    abort: list[str] = field(default_factory=list)
    came: list[Received | NotReceived] = field(default_factory=list)


class KVConnector(Protocol):
    """The connector of one engine; whoever owns the engine owns it."""

    @property
    def falls_back(self) -> bool:
        """Returns True if a prompt that does not come is computed here; otherwise its request ends with an error."""

    def refuses(self, request: Request) -> str:
        """Returns a reason why this request's keys and values cannot come from another engine, or an empty string if
        they can.
        """

    def skip(self, reason: str) -> None:
        """Counts a sequence that is computed here instead, for this reason."""

    def receive(self, sequence: "Sequence") -> None:
        """Has another engine fill the pages of a sequence from `num_computed` on; `take` reports the result."""

    def cancel(self, sequence: "Sequence") -> None:
        """Cancels a sequence's transfer to this engine. Its pages stay pinned for as long as they may be written to."""

    def has_news(self, now_s: float) -> bool:
        """True if `take` has something to return, or a transfer to end."""

    def take(self, now_s: float, prefill_tokens_per_s: float) -> Work:
        """Returns what has happened since the last call, without waiting. Estimates use the rate, which is this
        engine's own.
        """

    def sends(self, sequence: "Sequence") -> bool:
        """Returns True if another engine waits for this sequence's keys and values."""

    def launched(self, sequence: "Sequence", num_tokens: int, layers: LayerProgress) -> None:
        """Reports that a pass which computes the first `num_tokens` tokens' keys and values begins; `layers` has its
        progress.
        """

    def computed(self, sequence: "Sequence", num_tokens: int) -> None:
        """Reports that the first `num_tokens` tokens' keys and values are computed. Called before its pages can be
        released.
        """

    def accept_failed(self, request_id: str, message: str) -> None:
        """Reports that a request of another engine, from `take`, cannot be served."""

    def divert(self, outputs: list[Output]) -> list[Output]:
        """Returns the outputs of this engine's own requests, and sends those of other engines' requests to them.

        Where a request with `retains_kv` has ended, its output says where its keys and values are.
        """

    def drop(self, request_id: str) -> None:
        """Reports that a request with `retains_kv` was aborted."""

    @property
    def stats(self) -> KVTransferStats:
        """Counters and gauges of the transfers."""
