"""Which kind of transport an engine exchanges its pages by, and what to do where it is not installed."""

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.kv_transfer.layout import KVMemory
from mini_infer_engine.kv_transfer.nixl_transport import NixlTransport
from mini_infer_engine.kv_transfer.transport import Transport, TransportChoice


def open_transport(choice: TransportChoice, engine_id: str, memory: KVMemory, rank: int = 0) -> Transport:
    """The transport that was asked for, of one pool. ModelError: it is not installed or cannot work here."""
    try:
        return NixlTransport(choice, engine_id, memory, rank)
    except ImportError as error:
        raise ModelError(
            f"KV transfer needs NIXL, which cannot be loaded ({error}): pip install 'mini-infer[disaggregated]', "
            "or start with --role unified --transfer-port 0."
        ) from None
