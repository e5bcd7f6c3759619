"""Combines two transports of one pool: if both reach a peer, each transfer uses the one that measured rates favour."""

import logging

from msgspec.structs import replace

from mini_infer_engine.kv_transfer.layout import KVLayout, KVMemory, Pool, Span
from mini_infer_engine.kv_transfer.protocol.wire import TransportAddress
from mini_infer_engine.kv_transfer.staging_slots import Area
from mini_infer_engine.kv_transfer.topology.path_selection import mapping_pays
from mini_infer_engine.kv_transfer.transport import Digest, How, Motion, TransportError
from mini_infer_engine.kv_transfer.transports.mapped_transport import MappedTransport
from mini_infer_engine.kv_transfer.transports.nixl_transport import NixlTransport

log = logging.getLogger(__name__)


class ChosenTransport:
    """Implements `transport.Transport` by mapped memory or NIXL, chosen for each transfer."""

    def __init__(self, mapped: MappedTransport, nixl: NixlTransport, memory: KVMemory) -> None:
        self.name = f"{mapped.name}+{nixl.name}"
        self._mapped, self._nixl, self._memory = mapped, nixl, memory
        self._peers: dict[str, KVLayout] = {}

    def enter_thread(self) -> None:
        """Prepares the thread for both transports."""
        self._mapped.enter_thread()
        self._nixl.enter_thread()

    def describe(self) -> TransportAddress:
        """Returns NIXL's address with the handle of the mapped pool."""
        [mapped], [nixl] = self._mapped.describe().ranks, self._nixl.describe().ranks
        return TransportAddress(self.name, [replace(nixl, shared=mapped.shared)])

    def add_peer(self, engine_id: str, layout: KVLayout, where: TransportAddress) -> None:
        """Connects by each transport that the peer has, too. Raises TransportError if none reaches it."""
        names, faults = where.transport.split("+"), list[str]()
        for transport in (self._mapped, self._nixl):
            if transport.name in names:
                try:
                    transport.add_peer(engine_id, layout, where)
                except TransportError as error:
                    faults.append(str(error))
        self._peers[engine_id] = layout
        if not self._mapped.reaches(engine_id) and not self._nixl.reaches(engine_id):
            self.remove_peer(engine_id)
            raise TransportError("; ".join(faults))
        for fault in faults:
            log.info("KV transfer with %s has one way less: %s", engine_id, fault)

    def remove_peer(self, engine_id: str) -> None:
        """Disconnects both transports from a peer."""
        self._peers.pop(engine_id, None)
        self._mapped.remove_peer(engine_id)
        self._nixl.remove_peer(engine_id)

    def tend(self) -> None:
        """Removes peers of this host whose processes have ended from both transports."""
        near = [engine_id for engine_id in self._peers if self._mapped.reaches(engine_id)]
        self._mapped.tend()
        for engine_id in near:
            if not self._mapped.reaches(engine_id):
                self.remove_peer(engine_id)

    def _chosen(self, engine_id: str, span: Span) -> MappedTransport | NixlTransport:
        """Returns the transport for a span. Both engines choose the same one, because they know the same facts of each
        other.
        """
        if engine_id not in self._peers:
            raise TransportError(f"{engine_id} is not connected")
        if not self._mapped.reaches(engine_id):
            return self._nixl
        if not self._nixl.reaches(engine_id):
            return self._mapped
        ours, theirs = self._memory.layout, self._peers[engine_id]
        pays = mapping_pays(ours, theirs, span, self._nixl.staging_area(engine_id, span))
        return self._mapped if pays else self._nixl

    def start(self, engine_id: str, how: How, span: Span) -> Motion:
        """Begins the transfer by the chosen transport."""
        return self._chosen(engine_id, span).start(engine_id, how, span)

    def staging_area(self, engine_id: str, span: Span) -> Area | None:
        """Returns the staging buffer that the chosen transport uses, if any."""
        return self._chosen(engine_id, span).staging_area(engine_id, span)

    def slot_bytes(self, engine_id: str, area: Area, pool: Pool = "pages") -> int:
        """Returns the bytes of NIXL's slots: only NIXL stages."""
        return self._nixl.slot_bytes(engine_id, area, pool)

    def stage(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        """Gathers tokens into a slot of NIXL's buffer."""
        return self._nixl.stage(engine_id, area, slot, span)

    def push(self, engine_id: str, area: Area, slot: int, their_slot: int, span: Span) -> Motion:
        """Writes a slot by NIXL."""
        return self._nixl.push(engine_id, area, slot, their_slot, span)

    def place(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        """Copies a slot of NIXL's buffer into pages."""
        return self._nixl.place(engine_id, area, slot, span)

    def digest(self, span: Span, consumer: KVLayout | None = None) -> Digest:
        """Begins to compute the digest of tokens in our pool."""
        return self._mapped.digest(span, consumer)

    def close(self) -> None:
        """Closes both transports."""
        self._mapped.close()
        self._nixl.close()
