"""Two transports of one pool: where both reach a peer, each transfer goes by the one that measured rates favour."""

import logging

from msgspec.structs import replace

from mini_infer_engine.kv_transfer.layout import KVLayout, KVMemory, Span
from mini_infer_engine.kv_transfer.protocol.wire import TransportAddress
from mini_infer_engine.kv_transfer.staging_slots import Area
from mini_infer_engine.kv_transfer.topology.path_selection import mapping_pays
from mini_infer_engine.kv_transfer.transport import How, Motion, TransportError
from mini_infer_engine.kv_transfer.transports.mapped_transport import MappedTransport
from mini_infer_engine.kv_transfer.transports.nixl_transport import NixlTransport

log = logging.getLogger(__name__)


class ChosenTransport:
    """See the module and `transport.Transport`."""

    def __init__(self, mapped: MappedTransport, nixl: NixlTransport, memory: KVMemory) -> None:
        self.name = f"{mapped.name}+{nixl.name}"
        self._mapped, self._nixl, self._memory = mapped, nixl, memory
        self._peers: dict[str, KVLayout] = {}

    def enter_thread(self) -> None:
        """See `Transport.enter_thread`."""
        self._mapped.enter_thread()
        self._nixl.enter_thread()

    def describe(self) -> TransportAddress:
        """See `Transport.describe`."""
        [mapped], [nixl] = self._mapped.describe().ranks, self._nixl.describe().ranks
        return TransportAddress(self.name, [replace(nixl, shared=mapped.shared)])

    def add_peer(self, engine_id: str, layout: KVLayout, where: TransportAddress) -> None:
        """See `Transport.add_peer`."""
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
        """See `Transport.remove_peer`."""
        self._peers.pop(engine_id, None)
        self._mapped.remove_peer(engine_id)
        self._nixl.remove_peer(engine_id)

    def tend(self) -> None:
        """See `Transport.tend`."""
        near = [engine_id for engine_id in self._peers if self._mapped.reaches(engine_id)]
        self._mapped.tend()
        for engine_id in near:
            if not self._mapped.reaches(engine_id):
                self.remove_peer(engine_id)

    def _chosen(self, engine_id: str, span: Span) -> MappedTransport | NixlTransport:
        """Both sides choose the same, for what they know of each other is the same."""
        if engine_id not in self._peers:
            raise TransportError(f"{engine_id} is not connected")
        if not self._mapped.reaches(engine_id):
            return self._nixl
        if not self._nixl.reaches(engine_id):
            return self._mapped
        ours, theirs = self._memory.layout, self._peers[engine_id]
        pays = mapping_pays(ours, theirs, span, self._nixl.way(engine_id, span))
        return self._mapped if pays else self._nixl

    def start(self, engine_id: str, how: How, span: Span) -> Motion:
        """See `Transport.start`."""
        return self._chosen(engine_id, span).start(engine_id, how, span)

    def way(self, engine_id: str, span: Span) -> Area | None:
        """See `Transport.way`."""
        return self._chosen(engine_id, span).way(engine_id, span)

    def slot_bytes(self, engine_id: str, area: Area) -> int:
        """See `Transport.slot_bytes`."""
        return self._nixl.slot_bytes(engine_id, area)

    def stage(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        """See `Transport.stage`."""
        return self._nixl.stage(engine_id, area, slot, span)

    def push(self, engine_id: str, area: Area, slot: int, their_slot: int, span: Span) -> Motion:
        """See `Transport.push`."""
        return self._nixl.push(engine_id, area, slot, their_slot, span)

    def place(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        """See `Transport.place`."""
        return self._nixl.place(engine_id, area, slot, span)

    def close(self) -> None:
        """See `Transport.close`."""
        self._mapped.close()
        self._nixl.close()
