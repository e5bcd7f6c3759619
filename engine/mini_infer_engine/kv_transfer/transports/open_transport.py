"""Opens the transport by which an engine exchanges its pages, or explains why it cannot work here."""

import logging

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.kv_transfer.layout import KVMemory
from mini_infer_engine.kv_transfer.transport import Transport, TransportChoice
from mini_infer_engine.kv_transfer.transports.chosen_transport import ChosenTransport
from mini_infer_engine.kv_transfer.transports.cuda_ipc import CudaIpcMemory
from mini_infer_engine.kv_transfer.transports.mapped_transport import MappedTransport
from mini_infer_engine.kv_transfer.transports.nixl_transport import NixlTransport
from mini_infer_engine.kv_transfer.transports.paced_transport import PacedTransport
from mini_infer_engine.kv_transfer.transports.shared_memory import HostMemory
from mini_infer_engine.kv_transfer.transports.two_pool_transport import TwoPoolTransport, states_id
from mini_infer_process.extras import install_hint

log = logging.getLogger(__name__)


def open_transport(choice: TransportChoice, engine_id: str, memory: KVMemory, rank: int = 0) -> Transport:
    """Opens the chosen transport for an engine's pools. Raises ModelError if it is not installed or cannot work
    here.
    """
    transport = _open(choice, engine_id, memory, rank)
    if memory.states is not None:
        transport = TwoPoolTransport(transport, _open(choice, states_id(engine_id), memory.states, rank))
    return transport if choice.bytes_per_s is None else PacedTransport(transport, choice.bytes_per_s)


def _open(choice: TransportChoice, engine_id: str, memory: KVMemory, rank: int) -> Transport:
    match choice.kind:
        case "shm":
            return MappedTransport(HostMemory(memory), memory, rank)
        case "cuda-ipc":
            return MappedTransport(CudaIpcMemory(memory), memory, rank)
        case "auto" if memory.device == "cuda":
            return _open_all(choice, engine_id, memory, rank)
        case _:
            return _open_nixl(choice, engine_id, memory, rank)


def _open_all(choice: TransportChoice, engine_id: str, memory: KVMemory, rank: int) -> Transport:
    """Opens each transport that works on this GPU. Raises ModelError if none does."""
    try:
        mapped = MappedTransport(CudaIpcMemory(memory), memory, rank)
    except (ModelError, OSError) as error:
        log.warning("KV transfer goes by NIXL alone: %s", error)
        return _open_nixl(choice, engine_id, memory, rank)
    try:
        return ChosenTransport(mapped, _open_nixl(choice, engine_id, memory, rank), memory)
    except ModelError as error:
        log.warning("KV transfer goes by CUDA IPC alone, between engines of this host: %s", error)
        return mapped


def _open_nixl(choice: TransportChoice, engine_id: str, memory: KVMemory, rank: int) -> NixlTransport:
    try:
        return NixlTransport(choice, engine_id, memory, rank)
    except ImportError as error:
        here = "cuda-ipc" if memory.device == "cuda" else "shm"
        raise ModelError(
            f"KV transfer needs NIXL, which cannot be loaded ({error}): {install_hint('disaggregated')}; "
            f"between engines of one host --kv-transport {here} needs none, and --role unified --transfer-port 0 "
            "switches KV transfer off."
        ) from None
