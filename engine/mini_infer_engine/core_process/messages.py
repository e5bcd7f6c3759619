"""What the HTTP process and the core process say to each other, as msgpack over ZMQ. No torch, no text, no sockets.

The front (the HTTP process) sends one `FrontMessage` a ZMQ message on its DEALER, the core one `CoreMessage` on
its ROUTER; all outputs of a step travel together, so that the front wakes once a step. A core has one front.
"""

from collections.abc import Iterable

import msgspec

from mini_infer_engine.core.request import Output, Request
from mini_infer_engine.core.stats import EngineStats


def core_id(client_id: str, serial: int) -> str:
    """The core's name for one choice of a client's request.

    Clients repeat their ids, above all when they try again; outputs that are still on their way must not find the
    second request.
    """
    return f"{client_id}#{serial}"


def client_ids(core_ids: Iterable[str]) -> list[str]:
    """The clients' ids behind these, once each; requests of other engines have none."""
    return list(dict.fromkeys(name.rpartition("#")[0] for name in core_ids if "#" in name))


class Add(msgspec.Struct, frozen=True, tag=True):
    """Serve this request."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for these any more. Unknown ids are ignored: they may have finished meanwhile."""

    request_ids: list[str]


class SnapshotWanted(msgspec.Struct, frozen=True, tag=True):
    """Send a `SnapshotTaken` with this ticket."""

    ticket: int


class SwitchRole(msgspec.Struct, frozen=True, tag=True):
    """The engine is for something else from now on (launch.Role); what it works on ends as it has begun."""

    role: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave, whatever is running."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The front's first message: from here on the core knows where to send; `Ready` follows when it is."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the text side must know of the model that the core runs."""

    max_model_len: int
    """Tokens of prompt and output together."""
    vocab_size: int
    page_size: int
    """Tokens a page."""
    num_pages: int
    revision: str = ""
    """What the keys of cached blocks begin with (contract.blocks.root_key)."""
    hidden_size: int = 0
    """Numbers of an embedding; 0: there are none."""
    kv_transport: str = ""
    """What moves keys and values from and to other engines; empty: nothing does."""
    tensor_parallel_size: int = 1
    """Ranks that share each layer."""
    pipeline_parallel_size: int = 1
    """Stages that share the layers."""
    data_parallel_size: int = 1
    """Engines of the server, each with a copy of it."""
    kernels: dict[str, str] = {}
    """Which kernels run, by the labels of the metric `mini_infer_engine_kernels_info`; empty for a pretended model."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Requests are welcome."""

    model: ModelInfo


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """What one step made; also sent without outputs when the stats have changed."""

    outputs: list[Output]
    stats: EngineStats


class SnapshotTaken(msgspec.Struct, frozen=True, tag=True):
    """An encoded contract.events.Snapshot."""

    ticket: int
    payload: bytes


class Published(msgspec.Struct, frozen=True, tag=True):
    """What a core would publish to gateways, where its front publishes for several: a topic and its payload."""

    topic: bytes
    payload: bytes


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The core cannot start or go on, and leaves; the reason is for people."""

    reason: str


FrontMessage = Add | Abort | SnapshotWanted | SwitchRole | Stop | Hello
CoreMessage = Ready | StepOutputs | SnapshotTaken | Published | Failed

encode = msgspec.msgpack.Encoder().encode
decode_from_front = msgspec.msgpack.Decoder(FrontMessage).decode
decode_from_core = msgspec.msgpack.Decoder(CoreMessage).decode
