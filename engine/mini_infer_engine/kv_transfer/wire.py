"""What engines say to each other about keys and values: msgpack over ZMQ, a DEALER that takes to a ROUTER that gives.

`Hello` comes first, and nothing else is answered before `Welcome`. Jobs are numbered by whoever takes.
"""

import msgspec

from mini_infer_engine.core.request import Request, TokenLogprobs
from mini_infer_engine.kv_transfer.layout import KVLayout
from mini_infer_engine.kv_transfer.mapped_memory import SharedPool
from mini_infer_engine.kv_transfer.staging import Area, StagingBuffer
from mini_infer_engine.kv_transfer.way import Place

VERSION = 5
"""Of these messages: both sides must speak the same."""


class RankAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a transport reaches one page pool."""

    metadata: bytes
    address: int
    """Of the pool in its process."""
    device: str
    device_index: int
    place: Place
    staging: dict[Area, StagingBuffer] = {}
    """The buffers whose slots are lent to others, to write to."""
    shared: SharedPool | None = None
    """How processes of the same host map the pool."""


class TransportAddress(msgspec.Struct, frozen=True):
    """Where a transport reaches an engine's page pools."""

    transport: str
    """Its name; of several that an engine has, all names, joined by +."""
    ranks: list[RankAddress]
    """One, or one of each rank of a tensor-parallel group."""


class Party(msgspec.Struct, frozen=True, kw_only=True):
    """An engine, as far as others must know it."""

    version: int
    engine_id: str
    """Its own, anew at each start."""
    role: str
    weights: str
    """What its keys and values depend on beside tokens: the checkpoint's content, as a digest, and its quantisation."""
    layout: KVLayout
    """Of each rank's pool."""
    where: TransportAddress


class Hello(msgspec.Struct, frozen=True, tag=True):
    """I shall ask for keys and values."""

    party: Party


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Ask."""

    party: Party


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Keys and values cannot move between us."""

    reason: str


class PrefillWanted(msgspec.Struct, frozen=True, tag=True):
    """Compute this prompt and its first token, and write keys and values into my pages."""

    job: int
    request: Request
    """It asks for one token after those that are known."""
    pages: list[int]
    """Mine, from token 0 on."""
    first_token: int
    """I have all before it."""
    lease_s: float
    """Until then, or longer where it is renewed, I keep the pages for you."""


class KVWanted(msgspec.Struct, frozen=True, tag=True):
    """Let me read what you have of these tokens' keys and values, and keep it until I say that I have."""

    job: int
    token_ids: list[int]
    cache_salt: str
    held_id: str
    """What you keep for this request; empty: what is in your prefix cache."""
    first_token: int
    """I have all before it."""
    lease_s: float


class Renew(msgspec.Struct, frozen=True, tag=True):
    """I still wait for these."""

    jobs: list[int]
    lease_s: float


class Release(msgspec.Struct, frozen=True, tag=True):
    """I have what I wanted, or want it no more: stop, and tell me when you have."""

    jobs: list[int]


class SlotLent(msgspec.Struct, frozen=True, tag=True):
    """Write what you have staged to this slot of my buffer. It is mine again when you say that it is `Written`, or that
    nothing of the job is written any more.
    """

    job: int
    serial: int
    slot: int


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """A prompt is in line here; with what its time can be estimated from."""

    job: int
    queued_tokens: int
    """Before it."""
    prefill_tokens_per_s: float
    """0: not measured yet; the same of the next."""
    bytes_per_s: float


class SlotWanted(msgspec.Struct, frozen=True, tag=True):
    """I am staging some of what you want: lend me a slot for it, by the same serial number."""

    job: int
    serial: int
    area: Area


class Written(msgspec.Struct, frozen=True, tag=True):
    """Tokens [begin, end) are in the slot that you have lent for this serial number: put them in place."""

    job: int
    serial: int
    begin: int
    end: int
    layers: tuple[int, int]
    """[from, to)."""


class AllWritten(msgspec.Struct, frozen=True, tag=True):
    """All that I have granted is in slots that I have told of."""

    job: int


class Prefilled(msgspec.Struct, frozen=True, tag=True):
    """Keys and values of all known tokens are in your pages, or in slots that I told of; this token follows them."""

    job: int
    token_id: int
    logprobs: list[TokenLogprobs]
    num_cached: int
    """Prompt tokens that were in my prefix cache."""
    num_bytes: int


class KVGranted(msgspec.Struct, frozen=True, tag=True):
    """Read these."""

    job: int
    pages: list[int]
    """Mine, from token 0 on; those before your first token are any."""
    num_tokens: int
    """From token 0 on."""
    lease_s: float
    """For so long from when you asked; what you have read later than that may be something else."""
    is_staged: bool = False
    """It comes as `Written`, one after the other until `AllWritten`."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """It cannot be done, and nothing of it is written any more."""

    job: int
    reason: str
    """One of a closed set, for metrics."""
    message: str


class Released(msgspec.Struct, frozen=True, tag=True):
    """Nothing of these is written any more."""

    jobs: list[int]


FromTaker = Hello | PrefillWanted | KVWanted | Renew | Release | SlotLent
FromGiver = Welcome | Refused | Accepted | Prefilled | KVGranted | SlotWanted | Written | AllWritten | Failed | Released

encode = msgspec.msgpack.Encoder().encode
decode_from_taker = msgspec.msgpack.Decoder(FromTaker).decode
decode_from_giver = msgspec.msgpack.Decoder(FromGiver).decode
