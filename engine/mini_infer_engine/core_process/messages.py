"""Messages between the HTTP process and the core process, as msgpack over ZMQ. No torch, no text, no sockets.

The front (the HTTP process) sends one `ApiServerMessage` in each ZMQ message on its DEALER, and the core one
`CoreMessage` on its ROUTER. All outputs of a step are in one message, so that the front wakes once a step. A core has
one front.
"""

from collections.abc import Iterable

import msgspec

from mini_infer_engine.config.pooling.pooler_config import LAST_TOKEN, PoolerConfig
from mini_infer_engine.core.request import Output, Request
from mini_infer_engine.core.stats import EngineStats
from mini_infer_engine.weight_transfer.exchange import LoadedWeights


def core_id(client_id: str, serial: int) -> str:
    """Returns the core's id for one choice of a client's request.

    Clients reuse their ids, above all in retries. Outputs of the first request that are still in flight must not be
    taken for those of the second.
    """
    return f"{client_id}#{serial}"


def client_ids(core_ids: Iterable[str]) -> list[str]:
    """Returns the clients' ids of these core ids, without duplicates. Requests of other engines have none."""
    return list(dict.fromkeys(name.rpartition("#")[0] for name in core_ids if "#" in name))


class Add(msgspec.Struct, frozen=True, tag=True):
    """Adds a request."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Aborts requests. Unknown ids are ignored: the requests may have finished meanwhile."""

    request_ids: list[str]


class SnapshotRequest(msgspec.Struct, frozen=True, tag=True):
    """Requests a snapshot of the prefix cache. `SnapshotReply` answers with the same ticket."""

    ticket: int


class Prefetch(msgspec.Struct, frozen=True, tag=True):
    """Loads the blocks of sessions from lower tiers, as their next requests are expected."""

    request_ids: list[str]
    """Ids of the sessions' last requests, as clients have them. Unknown ones are ignored."""
    ttl_s: float
    """Seconds within which they are expected."""


class Hint(msgspec.Struct, frozen=True, tag=True):
    """Gives the cached blocks of a request's prompt the request's lease. Nothing is computed."""

    request: Request


class SwitchRole(msgspec.Struct, frozen=True, tag=True):
    """Changes the engine's role (launch.Role). Requests that are running finish as they have begun."""

    role: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Ends the core at once, whatever is running."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Opens the connection: the core answers with `Ready` once it has loaded."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of the core's model that the text side needs."""

    max_model_len: int
    """The most tokens of prompt and output together."""
    vocab_size: int
    page_size: int
    """Tokens per page."""
    num_pages: int
    kv_cache_tokens: int = 0
    """Tokens of sequences as long as the context that fit into the pages together; 0: as many as the pages have.

    The two differ where a page has only some layers, or where windows free pages.
    """
    revision: str = ""
    """Root of the keys of cached blocks (contract.blocks.root_key)."""
    hidden_size: int = 0
    """Width of the model's hidden states."""
    vision: str = ""
    """Family of the vision encoder (`config.model.vision.VisionFamily`); empty if the model reads text alone."""
    max_images: int = 0
    """Most images of a prompt (`--limit-mm-per-prompt`)."""
    pooler: PoolerConfig = LAST_TOKEN
    """The pooler of a model, which computes the result of a pooling request."""
    output_room: int = 1
    """Tokens of the context that a prompt must leave free."""
    kv_transport: str = ""
    """Name of the transport for KV transfer; empty if it is off."""
    tensor_parallel_size: int = 1
    """Ranks that share each layer."""
    pipeline_parallel_size: int = 1
    """Pipeline stages that share the layers."""
    data_parallel_size: int = 1
    """Engines of the server, each with a copy of the model."""
    weights: LoadedWeights = LoadedWeights()
    """The way in which the first rank's weights were loaded."""
    start_seconds: dict[str, float] = {}
    """Seconds of each stage of the start, by its name; empty for a dry run."""
    model_impl: str = ""
    """The code that computes the model: native or transformers; empty for a dry run."""
    device_memory: dict[str, int] = {}
    """Bytes that the first rank keeps on its device, by tag (`runtime.memory.device_memory`); empty for a dry run."""
    kernels: dict[str, str] = {}
    """The kernels that run, by labels of the metric `mini_infer_engine_kernels_info`; empty for a dry run."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Reports that the model is loaded and requests are accepted."""

    model: ModelInfo


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """Reports the outputs of one step. It is also sent without outputs if the statistics have changed."""

    outputs: list[Output]
    stats: EngineStats


class SnapshotReply(msgspec.Struct, frozen=True, tag=True):
    """Returns a snapshot, as an encoded contract.events.Snapshot."""

    ticket: int
    payload: bytes


class Published(msgspec.Struct, frozen=True, tag=True):
    """Passes a topic and payload for gateways to the front, which publishes for several cores."""

    topic: bytes
    payload: bytes


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Reports that the core cannot start or go on, and ends; the reason is for people."""

    reason: str


ApiServerMessage = Add | Abort | SnapshotRequest | Prefetch | Hint | SwitchRole | Stop | Hello
CoreMessage = Ready | StepOutputs | SnapshotReply | Published | Failed

encode = msgspec.msgpack.Encoder().encode
decode_from_api_server = msgspec.msgpack.Decoder(ApiServerMessage).decode
decode_from_core = msgspec.msgpack.Decoder(CoreMessage).decode
