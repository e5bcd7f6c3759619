"""Messages between engines about keys and values: msgpack over ZMQ, from a DEALER (consumer) to a ROUTER (producer).

`Hello` comes first, and nothing else is answered before `Welcome`. The consumer numbers the jobs. Decoding checks each
value by itself; `handshake` and `message_checks` check what must fit together.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mini_infer_engine.core.request import Request, TokenLogprobs
from mini_infer_engine.kv_transfer.layout import KVLayout, Pool
from mini_infer_engine.kv_transfer.staging_slots import RECEIVE_SLOTS, Area, StagingBuffer
from mini_infer_engine.kv_transfer.topology.mapped_memory import SharedPool
from mini_infer_engine.kv_transfer.topology.path_selection import Place

VERSION = 8
"""Version of these messages: both engines must use the same one."""


_MAX_TOKENS = 1 << 24
_Job = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Jobs = Annotated[list[_Job], Meta(max_length=1 << 16)]
_Tokens = Annotated[int, Meta(ge=0, le=_MAX_TOKENS)]
_TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
_TokenIds = Annotated[list[_TokenId], Meta(max_length=_MAX_TOKENS)]
_Pages = Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 31)]], Meta(max_length=_MAX_TOKENS)]
_Lease = Annotated[float, Meta(gt=0, le=86_400)]
"""Seconds of a lease. A producer retains nothing for longer than `MAX_LEASE_S`."""
_Rate = Annotated[float, Meta(ge=0, le=1e18)]
"""A rate per second. It is finite, because time-outs are computed from it."""
_StateSlot = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Digest = Annotated[int, Meta(ge=0)]
"""The digest of all tokens of a job, and of the recurrent state after them, as the consumer should have them (see
`token_digests`).
"""
_Size = Annotated[int, Meta(ge=0, lt=1 << 53)]
_Layer = Annotated[int, Meta(ge=0, le=1 << 16)]
_Name = Annotated[str, Meta(max_length=512)]
_Message = Annotated[str, Meta(max_length=65_536)]


class RankAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address at which a transport reaches one page pool."""

    metadata: Annotated[bytes, Meta(max_length=1 << 20)]
    address: Annotated[int, Meta(ge=0)]
    """Address of the pool in its process."""
    device: Literal["cpu", "cuda"]
    device_index: Annotated[int, Meta(ge=0, le=1024)]
    place: Place
    staging: dict[Area, StagingBuffer] = {}
    """Staging buffers whose slots are lent to peers, which write to them."""
    shared: SharedPool | None = None
    """Handle by which processes of the same host map the pool. None if it is not shared."""
    states: "RankAddress | None" = None
    """The address of the rank's pool of recurrent states, which has no `states` itself. None if there is none."""


class TransportAddress(msgspec.Struct, frozen=True):
    """The addresses at which a transport reaches an engine's page pools."""

    transport: _Name
    """Name of the transport; an engine with several joins their names by "+"."""
    ranks: Annotated[list[RankAddress], Meta(min_length=1, max_length=1024)]
    """One address, or one for each rank of a tensor-parallel group."""


class Party(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's description of itself for its peers."""

    version: int
    engine_id: Annotated[str, Meta(min_length=1, max_length=512)]
    """Id of the engine, which is new at each start."""
    role: _Name
    weights: _Name
    """Identifies all that keys and values depend on beside the tokens: a digest of the checkpoint and its quantisation.
    """
    layout: KVLayout
    """Layout of each rank's pool."""
    where: TransportAddress


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Opens a consumer's connection, over which it will request keys and values."""

    party: Party


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Accepts a connection: requests may follow."""

    party: Party


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Refuses a connection: keys and values cannot move between the two engines."""

    reason: _Message


class PrefillRequested(msgspec.Struct, frozen=True, tag=True):
    """Requests that the producer computes a prompt and its first token, and writes keys and values into the consumer's
    pages.
    """

    job: _Job
    request: Request
    """The request, which generates one token after those that are known."""
    pages: _Pages
    """The consumer's pages, from token 0 on."""
    first_token: _Tokens
    """The first token to write: the consumer has keys and values of all tokens before it."""
    lease_s: _Lease
    """Seconds for which the consumer keeps the pages for the producer, unless it renews the lease."""
    state_slot: _StateSlot | None = None
    """The consumer's slot for the recurrent state after all known tokens. None if the model has none."""


class KVRequested(msgspec.Struct, frozen=True, tag=True):
    """Requests to read the producer's keys and values of these tokens, which it retains until the consumer releases
    them.
    """

    job: _Job
    token_ids: _TokenIds
    """Token ids as block keys have them: words of an image's digest stand for its placeholders."""
    cache_salt: str
    held_id: Annotated[str, Meta(max_length=4096)]
    """Id of the request whose pages the producer retains. Empty if its prefix cache is to be searched instead."""
    first_token: _Tokens
    """The first token to read: the consumer has keys and values of all tokens before it."""
    lease_s: _Lease


class Renew(msgspec.Struct, frozen=True, tag=True):
    """Renews the leases of jobs for which the consumer still waits."""

    jobs: _Jobs
    lease_s: _Lease


class Release(msgspec.Struct, frozen=True, tag=True):
    """Ends jobs that are complete or no longer needed. The producer stops, and answers with `Released` once it has."""

    jobs: _Jobs


class SlotGranted(msgspec.Struct, frozen=True, tag=True):
    """Lends a slot of the consumer's buffer to a staged part. The producer owns it until it sends `Written`, or reports
    that nothing of the job is written any more.
    """

    job: _Job
    serial: _Job
    slot: Annotated[int, Meta(ge=RECEIVE_SLOTS.start, lt=RECEIVE_SLOTS.stop)]


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """Reports that a prompt is queued, with the rates from which the consumer estimates its time."""

    job: _Job
    queued_tokens: _Size
    """Tokens in the producer's queue before this prompt."""
    prefill_tokens_per_s: _Rate
    """Prefill rate of the producer; 0 if it has not been measured yet, which holds for `bytes_per_s`, too."""
    bytes_per_s: _Rate


class SlotRequested(msgspec.Struct, frozen=True, tag=True):
    """Requests a slot of the consumer's staging buffer for a part that is being staged. `SlotGranted` answers with the
    same serial number.
    """

    job: _Job
    serial: _Job
    area: Area


class Written(msgspec.Struct, frozen=True, tag=True):
    """Reports that tokens [begin, end) are in the slot of this serial number. The consumer copies them
    into its pages.
    """

    job: _Job
    serial: _Job
    begin: _Tokens
    end: _Tokens
    layers: tuple[_Layer, _Layer]
    """Layers [from, to)."""
    pool: Pool = "pages"
    """The pool into which they belong. Tokens [0, 1) of that of states are the recurrent state of the sequence."""


class AllWritten(msgspec.Struct, frozen=True, tag=True):
    """Reports the end of the staged part of a read: there has been a `Written` for each piece of it."""

    job: _Job


class Prefilled(msgspec.Struct, frozen=True, tag=True):
    """Reports the end of a prefill: keys and values of all known tokens are in the consumer's pages, or in slots for
    which `Written` was sent. `token_id` follows them.
    """

    job: _Job
    token_id: _TokenId
    logprobs: Annotated[list[TokenLogprobs], Meta(max_length=1)]
    num_cached: _Tokens
    """Prompt tokens that were in the producer's prefix cache."""
    num_bytes: _Size
    digest: _Digest = 0


class KVGranted(msgspec.Struct, frozen=True, tag=True):
    """Grants a read of these pages."""

    job: _Job
    pages: _Pages
    """The producer's pages from token 0 on. Those before the consumer's first token are arbitrary."""
    num_tokens: _Tokens
    """Number of tokens from token 0 on whose keys and values are in the pages."""
    lease_s: _Lease
    """Seconds from the consumer's request for which the pages are retained. Pages that are read later may belong to
    another prompt.
    """
    is_staged: bool = False
    """True if the tokens come through staging slots: a `Written` for each part, and then `AllWritten`."""
    state_slot: _StateSlot | None = None
    """The producer's slot of the recurrent state after these tokens. None if the model has none."""
    is_state_staged: bool = False
    """True if the state comes through staging slots, before `AllWritten`."""
    digest: _Digest = 0


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Reports that a job has failed, and that nothing of it is written any more."""

    job: _Job
    reason: _Name
    """One of a closed set of reasons, for metrics."""
    message: _Message


class Released(msgspec.Struct, frozen=True, tag=True):
    """Reports that nothing of these jobs is written any more."""

    jobs: _Jobs


FromConsumer = Hello | PrefillRequested | KVRequested | Renew | Release | SlotGranted
FromProducer = (
    Welcome | Refused | Accepted | Prefilled | KVGranted | SlotRequested | Written | AllWritten | Failed | Released
)

encode = msgspec.msgpack.Encoder().encode
decode_from_consumer = msgspec.msgpack.Decoder(FromConsumer).decode
decode_from_producer = msgspec.msgpack.Decoder(FromProducer).decode
