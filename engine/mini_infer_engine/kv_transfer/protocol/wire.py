"""What engines say to each other about keys and values: msgpack over ZMQ, a DEALER that takes to a ROUTER that gives.

`Hello` comes first, and nothing else is answered before `Welcome`. Jobs are numbered by whoever takes. Decoding checks
each value by itself; what must fit together is checked by `handshake` and `message_checks`.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mini_infer_engine.core.request import Request, TokenLogprobs
from mini_infer_engine.kv_transfer.layout import KVLayout
from mini_infer_engine.kv_transfer.staging_slots import LENT, Area, StagingBuffer
from mini_infer_engine.kv_transfer.topology.mapped_memory import SharedPool
from mini_infer_engine.kv_transfer.topology.path_selection import Place

VERSION = 5
"""Of these messages: both sides must speak the same."""


_MAX_TOKENS = 1 << 24
_Job = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Jobs = Annotated[list[_Job], Meta(max_length=1 << 16)]
_Tokens = Annotated[int, Meta(ge=0, le=_MAX_TOKENS)]
_TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
_TokenIds = Annotated[list[_TokenId], Meta(max_length=_MAX_TOKENS)]
_Pages = Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 31)]], Meta(max_length=_MAX_TOKENS)]
_Lease = Annotated[float, Meta(gt=0, le=86_400)]
"""Seconds. Whoever gives keeps nothing for longer than `MAX_LEASE_S`."""
_Rate = Annotated[float, Meta(ge=0, le=1e18)]
"""Finite: time-outs are computed from it."""
_Size = Annotated[int, Meta(ge=0, lt=1 << 53)]
_Layer = Annotated[int, Meta(ge=0, le=1 << 16)]
_Name = Annotated[str, Meta(max_length=512)]
_Message = Annotated[str, Meta(max_length=65_536)]


class RankAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a transport reaches one page pool."""

    metadata: Annotated[bytes, Meta(max_length=1 << 20)]
    address: Annotated[int, Meta(ge=0)]
    """Of the pool in its process."""
    device: Literal["cpu", "cuda"]
    device_index: Annotated[int, Meta(ge=0, le=1024)]
    place: Place
    staging: dict[Area, StagingBuffer] = {}
    """The buffers whose slots are lent to others, to write to."""
    shared: SharedPool | None = None
    """How processes of the same host map the pool."""


class TransportAddress(msgspec.Struct, frozen=True):
    """Where a transport reaches an engine's page pools."""

    transport: _Name
    """Its name; of several that an engine has, all names, joined by +."""
    ranks: Annotated[list[RankAddress], Meta(min_length=1, max_length=1024)]
    """One, or one of each rank of a tensor-parallel group."""


class Party(msgspec.Struct, frozen=True, kw_only=True):
    """An engine, as far as others must know it."""

    version: int
    engine_id: Annotated[str, Meta(min_length=1, max_length=512)]
    """Its own, anew at each start."""
    role: _Name
    weights: _Name
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

    reason: _Message


class PrefillWanted(msgspec.Struct, frozen=True, tag=True):
    """Compute this prompt and its first token, and write keys and values into my pages."""

    job: _Job
    request: Request
    """It asks for one token after those that are known."""
    pages: _Pages
    """Mine, from token 0 on."""
    first_token: _Tokens
    """I have all before it."""
    lease_s: _Lease
    """Until then, or longer where it is renewed, I keep the pages for you."""


class KVWanted(msgspec.Struct, frozen=True, tag=True):
    """Let me read what you have of these tokens' keys and values, and keep it until I say that I have."""

    job: _Job
    token_ids: _TokenIds
    cache_salt: str
    held_id: Annotated[str, Meta(max_length=4096)]
    """What you keep for this request; empty: what is in your prefix cache."""
    first_token: _Tokens
    """I have all before it."""
    lease_s: _Lease


class Renew(msgspec.Struct, frozen=True, tag=True):
    """I still wait for these."""

    jobs: _Jobs
    lease_s: _Lease


class Release(msgspec.Struct, frozen=True, tag=True):
    """I have what I wanted, or want it no more: stop, and tell me when you have."""

    jobs: _Jobs


class SlotLent(msgspec.Struct, frozen=True, tag=True):
    """Write what you have staged to this slot of my buffer. It is mine again when you say that it is `Written`, or that
    nothing of the job is written any more.
    """

    job: _Job
    serial: _Job
    slot: Annotated[int, Meta(ge=LENT.start, lt=LENT.stop)]


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """A prompt is in line here; with what its time can be estimated from."""

    job: _Job
    queued_tokens: _Size
    """Before it."""
    prefill_tokens_per_s: _Rate
    """0: not measured yet; the same of the next."""
    bytes_per_s: _Rate


class SlotWanted(msgspec.Struct, frozen=True, tag=True):
    """I am staging some of what you want: lend me a slot for it, by the same serial number."""

    job: _Job
    serial: _Job
    area: Area


class Written(msgspec.Struct, frozen=True, tag=True):
    """Tokens [begin, end) are in the slot that you have lent for this serial number: put them in place."""

    job: _Job
    serial: _Job
    begin: _Tokens
    end: _Tokens
    layers: tuple[_Layer, _Layer]
    """[from, to)."""


class AllWritten(msgspec.Struct, frozen=True, tag=True):
    """All that I have granted is in slots that I have told of."""

    job: _Job


class Prefilled(msgspec.Struct, frozen=True, tag=True):
    """Keys and values of all known tokens are in your pages, or in slots that I told of; this token follows them."""

    job: _Job
    token_id: _TokenId
    logprobs: Annotated[list[TokenLogprobs], Meta(max_length=1)]
    num_cached: _Tokens
    """Prompt tokens that were in my prefix cache."""
    num_bytes: _Size


class KVGranted(msgspec.Struct, frozen=True, tag=True):
    """Read these."""

    job: _Job
    pages: _Pages
    """Mine, from token 0 on; those before your first token are any."""
    num_tokens: _Tokens
    """From token 0 on."""
    lease_s: _Lease
    """For so long from when you asked; what you have read later than that may be something else."""
    is_staged: bool = False
    """It comes as `Written`, one after the other until `AllWritten`."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """It cannot be done, and nothing of it is written any more."""

    job: _Job
    reason: _Name
    """One of a closed set, for metrics."""
    message: _Message


class Released(msgspec.Struct, frozen=True, tag=True):
    """Nothing of these is written any more."""

    jobs: _Jobs


FromTaker = Hello | PrefillWanted | KVWanted | Renew | Release | SlotLent
FromGiver = Welcome | Refused | Accepted | Prefilled | KVGranted | SlotWanted | Written | AllWritten | Failed | Released

encode = msgspec.msgpack.Encoder().encode
decode_from_taker = msgspec.msgpack.Decoder(FromTaker).decode
decode_from_giver = msgspec.msgpack.Decoder(FromGiver).decode
