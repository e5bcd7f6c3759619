"""What the core's thread and the transfer thread tell each other: plain data in two queues."""

from collections.abc import Sequence
from dataclasses import dataclass

from mini_infer_engine.core.kv_transfer import LayerProgress
from mini_infer_engine.core.request import KVSource, Request, TokenLogprobs

# -- From the core


@dataclass(slots=True, frozen=True)
class Take:
    """Have these pages filled by another engine."""

    job: int
    request: Request
    """Of the sequence that receives, its known output included as `resumed_token_ids`."""
    source: KVSource
    pages: list[int]
    """From token 0 on."""
    first_token: int
    """All before it is there."""
    num_tokens: int
    """Known ones, which are to be there in the end."""


@dataclass(slots=True, frozen=True)
class Cancel:
    """Nobody waits for this any more."""

    job: int


@dataclass(slots=True, frozen=True)
class Give:
    """Tokens [begin, end) of a prompt for another engine have been computed, and lie in these pages from token 0 on."""

    key: str
    serial: int
    pages: list[int]
    begin: int
    end: int
    layers: LayerProgress | None = None
    """They are still being computed: so many layers may be read as it says. None: all have been computed."""


@dataclass(slots=True, frozen=True)
class GiveEnd:
    """The whole prompt has been given, and this is its first token."""

    key: str
    token_id: int
    logprobs: Sequence[TokenLogprobs]
    num_cached: int


@dataclass(slots=True, frozen=True)
class Grant:
    """Another engine may read these pages, which hold this many tokens from token 0 on; they are pinned."""

    key: str
    pages: list[int]
    num_tokens: int


@dataclass(slots=True, frozen=True)
class Refuse:
    """What another engine wants cannot be."""

    key: str
    reason: str
    message: str


Command = Take | Cancel | Give | GiveEnd | Grant | Refuse

# -- To the core


@dataclass(slots=True, frozen=True)
class PrefillAsked:
    """Another engine wants a prompt computed; what is made of it is told in `Give` of multiples of `alignment`."""

    key: str
    request: Request
    first_token: int
    alignment: int


@dataclass(slots=True, frozen=True)
class KVAsked:
    """Another engine wants to read."""

    key: str
    token_ids: list[int]
    cache_salt: str
    held_id: str
    first_token: int


@dataclass(slots=True, frozen=True)
class Gone:
    """Whoever wanted this has it, wants it no more, or is gone: its work ends, what is pinned for reading is free."""

    key: str


@dataclass(slots=True, frozen=True)
class Given:
    """The pages of a `Give` are read no more."""

    key: str
    serial: int


@dataclass(slots=True, frozen=True)
class Taken:
    """Tokens [0, num_tokens) are in the job's pages."""

    job: int
    num_tokens: int
    token_id: int | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    num_cached: int = 0


@dataclass(slots=True, frozen=True)
class NotTaken:
    """Nothing comes for this job; its pages may change until it is settled."""

    job: int
    reason: str
    message: str


@dataclass(slots=True, frozen=True)
class Settled:
    """Nothing writes to the job's pages any more."""

    job: int


Event = PrefillAsked | KVAsked | Gone | Given | Taken | NotTaken | Settled
