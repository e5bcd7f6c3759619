"""Combines the transports of an engine's two pools: its pages, and the slots of its recurrent states.

The pool of a span decides. Each pool is registered with a transport of its own, to peers by an id of its own.
"""

from msgspec.structs import replace

from mini_infer_engine.kv_transfer.layout import KVLayout, Pool, Span
from mini_infer_engine.kv_transfer.protocol.wire import TransportAddress
from mini_infer_engine.kv_transfer.staging_slots import Area
from mini_infer_engine.kv_transfer.transport import Digest, How, Motion, Transport, TransportError


def states_id(engine_id: str) -> str:
    """Returns the id by which an engine's transport of states is known to its peers."""
    return f"{engine_id}/states"


class TwoPoolTransport:
    """Implements `transport.Transport` by one transport for pages and one for states."""

    def __init__(self, pages: Transport, states: Transport) -> None:
        """Combines two transports of the same kind."""
        self.name = pages.name
        self._pages, self._states = pages, states

    def enter_thread(self) -> None:
        """Prepares the thread for both transports."""
        self._pages.enter_thread()
        self._states.enter_thread()

    def describe(self) -> TransportAddress:
        """Returns the address of the pages, which has that of the states in it."""
        where, [states] = self._pages.describe(), self._states.describe().ranks
        [pages] = where.ranks
        return TransportAddress(where.transport, [replace(pages, states=states)])

    def add_peer(self, engine_id: str, layout: KVLayout, where: TransportAddress) -> None:
        """Connects to both pools of a peer. Raises TransportError, and connects to none, if one cannot be reached."""
        ranks = [rank.states for rank in where.ranks if rank.states is not None]
        if layout.states is None or len(ranks) != len(where.ranks):
            raise TransportError(f"{engine_id} does not share its recurrent states")
        self._pages.add_peer(engine_id, layout, where)
        try:
            self._states.add_peer(states_id(engine_id), layout.states, TransportAddress(where.transport, ranks))
        except TransportError:
            self._pages.remove_peer(engine_id)
            raise

    def remove_peer(self, engine_id: str) -> None:
        """Disconnects from both pools of a peer."""
        self._pages.remove_peer(engine_id)
        self._states.remove_peer(states_id(engine_id))

    def tend(self) -> None:
        """Frees what both transports have of peers that have ended."""
        self._pages.tend()
        self._states.tend()

    def start(self, engine_id: str, how: How, span: Span) -> Motion:
        """Begins the transfer of a span."""
        transport, peer = self._of(engine_id, span.pool)
        return transport.start(peer, how, span)

    def staging_area(self, engine_id: str, span: Span) -> Area | None:
        """Returns the staging buffer of the span's pool, if it goes through one."""
        transport, peer = self._of(engine_id, span.pool)
        return transport.staging_area(peer, span)

    def slot_bytes(self, engine_id: str, area: Area, pool: Pool = "pages") -> int:
        """Returns the bytes of the slots of a pool's staging buffer."""
        transport, peer = self._of(engine_id, pool)
        return transport.slot_bytes(peer, area)

    def stage(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        """Gathers a span into a slot of its pool's staging buffer."""
        transport, peer = self._of(engine_id, span.pool)
        return transport.stage(peer, area, slot, span)

    def push(self, engine_id: str, area: Area, slot: int, their_slot: int, span: Span) -> Motion:
        """Writes a filled slot to the staging buffer of the same pool of the peer."""
        transport, peer = self._of(engine_id, span.pool)
        return transport.push(peer, area, slot, their_slot, span)

    def place(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        """Copies a slot of the span's pool to where the span says."""
        transport, peer = self._of(engine_id, span.pool)
        return transport.place(peer, area, slot, span)

    def digest(self, span: Span, consumer: KVLayout | None = None) -> Digest:
        """Begins to compute the digest of tokens or of a state."""
        transport = self._pages if span.pool == "pages" else self._states
        return transport.digest(span, None if consumer is None else consumer.of(span.pool))

    def close(self) -> None:
        """Closes both transports."""
        self._pages.close()
        self._states.close()

    def _of(self, engine_id: str, pool: Pool) -> tuple[Transport, str]:
        """Returns the transport of a pool, and the peer's id there."""
        return (self._pages, engine_id) if pool == "pages" else (self._states, states_id(engine_id))
