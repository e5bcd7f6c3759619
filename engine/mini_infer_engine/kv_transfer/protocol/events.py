"""Defines commands from the core's thread to the transfer thread, and events in the other direction, as plain data."""

from collections.abc import Sequence
from dataclasses import dataclass

from mini_infer_engine.core.kv_transfer import LayerProgress
from mini_infer_engine.core.request import KVSource, Request, TokenLogprobs
from mini_infer_engine.kv_transfer.layout import Pool

# -- From the core


@dataclass(slots=True, frozen=True)
class Take:
    """Requests that another engine fills these pages."""

    job: int
    request: Request
    """The request of the receiving sequence, with the output so far as `resumed_token_ids`."""
    source: KVSource
    pages: list[int]
    """The sequence's pages from token 0 on."""
    first_token: int
    """The first token to transfer: keys and values of all tokens before it are in the pages already."""
    num_tokens: int
    """Number of known tokens (prompt and output so far), whose keys and values are to be in the pages at the end."""
    state_slot: int | None = None
    """The slot for the recurrent state after these tokens; None if the model has none."""


@dataclass(slots=True, frozen=True)
class Cancel:
    """Cancels a job whose result is no longer needed."""

    job: int


@dataclass(slots=True, frozen=True)
class Send:
    """Hands over computed tokens [begin, end) of another engine's prompt, or the recurrent state after all of them. The
    pages are those from token 0 on.
    """

    key: str
    serial: int
    pages: list[int]
    begin: int
    end: int
    layers: LayerProgress | None = None
    """Progress of the pass that still computes these tokens: only the layers that it reports as done may be read. None
    if all layers are done.
    """
    pool: Pool = "pages"
    """The pool of `pages`. In that of states there is one page, the slot of the state, with tokens [0, 1)."""


@dataclass(slots=True, frozen=True)
class SendEnd:
    """Reports the first sampled token of a prompt, after a `Send` for each part of it."""

    key: str
    token_id: int
    logprobs: Sequence[TokenLogprobs]
    num_cached: int


@dataclass(slots=True, frozen=True)
class Grant:
    """Lets another engine read these pages, which hold this many tokens from token 0 on and are pinned."""

    key: str
    pages: list[int]
    num_tokens: int
    state_slot: int | None = None
    """The slot of the recurrent state after these tokens; None if the model has none."""


@dataclass(slots=True, frozen=True)
class Refuse:
    """Refuses another engine's request."""

    key: str
    reason: str
    message: str


Command = Take | Cancel | Send | SendEnd | Grant | Refuse

# -- To the core


@dataclass(slots=True, frozen=True)
class PrefillRequest:
    """Another engine requests the prefill of a prompt. Computed tokens are handed over as `Send` commands whose ends
    are multiples of `alignment`, except for the last one.
    """

    key: str
    request: Request
    first_token: int
    alignment: int


@dataclass(slots=True, frozen=True)
class KVRequest:
    """Another engine requests to read keys and values."""

    key: str
    token_ids: list[int]
    cache_salt: str
    retained_id: str
    first_token: int


@dataclass(slots=True, frozen=True)
class JobEnded:
    """A job of another engine has ended: it was completed, cancelled, or its engine is gone. Its work is aborted, and
    pages that were pinned for reading are unpinned.
    """

    key: str


@dataclass(slots=True, frozen=True)
class SendDone:
    """The pages of a `Send` are no longer read."""

    key: str
    serial: int


@dataclass(slots=True, frozen=True)
class TransferDone:
    """Keys and values of tokens [0, num_tokens) are in the job's pages."""

    job: int
    num_tokens: int
    token_id: int | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    num_cached: int = 0


@dataclass(slots=True, frozen=True)
class TransferFailed:
    """The job has failed. Its pages may still be written to until `Settled`."""

    job: int
    reason: str
    message: str


@dataclass(slots=True, frozen=True)
class Settled:
    """The job's pages are no longer written to."""

    job: int


Event = PrefillRequest | KVRequest | JobEnded | SendDone | TransferDone | TransferFailed | Settled
