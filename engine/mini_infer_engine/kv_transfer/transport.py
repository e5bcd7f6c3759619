"""What moves bytes between the page pools of two engines: the interface, and the choice between its kinds."""

from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.kv_transfer.layout import KVMemory
from mini_infer_engine.kv_transfer.wire import TransportAddress

Progress = Literal["busy", "done", "failed"]


class TransportError(RuntimeError):
    """A peer is gone, or never was: whoever moves something from or to it does it another way."""


class Motion(Protocol):
    """Bytes on their way."""

    def progress(self) -> Progress:
        """How far they are, without waiting; `failed`: some may have arrived, and none will any more.

        There is no way to stop them: what has begun to move may arrive until it is `done` or `failed`, and whoever owns
        the pages keeps them until then.
        """


class Transport(Protocol):
    """Of one pool, which it registers when it is made. Used by one thread."""

    name: str

    def enter_thread(self) -> None:
        """Called once, by the thread that uses it from then on."""

    def describe(self) -> TransportAddress:
        """What another engine needs to reach this pool."""

    def add_peer(self, engine_id: str, where: TransportAddress) -> None:
        """Get to know another engine's pool; one that is known already is replaced. TransportError."""

    def remove_peer(self, engine_id: str) -> None:
        """Forget it, and free what is kept for it."""

    def start(self, engine_id: str, how: Literal["write", "read"], pieces: np.ndarray) -> Motion:
        """Write to a peer's pool or read from it: pieces [n, 3] are (our offset, its offset, bytes). TransportError."""

    def close(self) -> None:
        """Unregister the pool."""


def open_transport(kind: str, engine_id: str, memory: KVMemory) -> Transport:
    """The transport for --kv-transport. ModelError: it is not installed or cannot work here."""
    makers: dict[str, Callable[[str, KVMemory], Transport]] = {"auto": _nixl, "nixl": _nixl}
    return makers[kind](engine_id, memory)


def _nixl(engine_id: str, memory: KVMemory) -> Transport:
    from mini_infer_engine.kv_transfer.nixl_transport import NixlTransport

    try:
        return NixlTransport(engine_id, memory)
    except ImportError as error:
        raise ModelError(
            f"KV transfer needs NIXL, which cannot be loaded ({error}): pip install 'mini-infer[disaggregated]', "
            "or start with --role unified --transfer-port 0."
        ) from None
