"""Which of two transports a transfer goes by, and which there are at all."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from msgspec.structs import replace

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.kv_transfer.layout import KVLayout, KVMemory, Span
from mini_infer_engine.kv_transfer.protocol.wire import RankAddress, TransportAddress
from mini_infer_engine.kv_transfer.staging_slots import Area
from mini_infer_engine.kv_transfer.topology.mapped_memory import SharedPool
from mini_infer_engine.kv_transfer.topology.path_selection import Place
from mini_infer_engine.kv_transfer.topology.peer_process import this_process
from mini_infer_engine.kv_transfer.transport import TransportChoice, TransportError
from mini_infer_engine.kv_transfer.transports import open_transport as opening
from mini_infer_engine.kv_transfer.transports.chosen_transport import ChosenTransport
from mini_infer_engine.kv_transfer.transports.mapped_transport import MappedTransport
from mini_infer_engine.kv_transfer.transports.nixl_transport import NixlTransport

WHOLE = KVLayout(num_layers=28, halves=2, page_size=128, num_heads=4, head_bytes=256, dtype="bfloat16")
MEMORY = KVMemory(address=1 << 20, num_pages=100, device="cuda", device_index=0, layout=WHOLE)
SHARED = SharedPool(kind="cuda-ipc", process=this_process(), handle=b"h", size=1, offset=0, pool_bytes=1)
RANK = RankAddress(
    metadata=b"nixl's", address=1, device="cuda", device_index=0, place=Place(ipc_domain="a", has_rdma=False)
)
SPAN = Span([0], [0], 0, 128)


@dataclass
class Fake:
    """A transport that reaches a peer, or does not."""

    name: str
    rank: RankAddress
    fault: str = ""
    staged_in: Area | None = None
    peers: set[str] = field(default_factory=set)
    started: list[str] = field(default_factory=list)
    lives: bool = True

    def describe(self) -> TransportAddress:
        return TransportAddress(self.name, [self.rank])

    def add_peer(self, engine_id: str, layout: KVLayout, where: TransportAddress) -> None:
        if self.fault:
            raise TransportError(self.fault)
        self.peers.add(engine_id)

    def remove_peer(self, engine_id: str) -> None:
        self.peers.discard(engine_id)

    def reaches(self, engine_id: str) -> bool:
        return engine_id in self.peers

    def tend(self) -> None:
        if not self.lives:
            self.peers.clear()

    def staging_area(self, engine_id: str, span: Span) -> Area | None:
        return self.staged_in

    def start(self, engine_id: str, how: str, span: Span) -> Any:
        self.started.append(how)


def made(**faults: str) -> tuple[ChosenTransport, Fake, Fake]:
    """Both, and which of them fail to reach anybody."""
    mapped = Fake("cuda-ipc", replace(RANK, metadata=b"", shared=SHARED), faults.get("mapped", ""))
    nixl = Fake("nixl", RANK, faults.get("nixl", ""))
    return ChosenTransport(cast("MappedTransport", mapped), cast("NixlTransport", nixl), MEMORY), mapped, nixl


def test_a_chosen_transports_address_names_both_transports() -> None:
    chosen, _, _ = made()
    assert chosen.name == "cuda-ipc+nixl"
    assert chosen.describe() == TransportAddress("cuda-ipc+nixl", [replace(RANK, shared=SHARED)])


@pytest.mark.parametrize(
    ("theirs", "faults", "expected"),
    [
        ("cuda-ipc+nixl", {}, "cuda-ipc"),
        ("cuda-ipc", {}, "cuda-ipc"),
        ("nixl", {}, "nixl"),
        ("cuda-ipc+nixl", {"mapped": "another host"}, "nixl"),
        ("cuda-ipc+nixl", {"nixl": "no way"}, "cuda-ipc"),
        ("cuda-ipc+nixl", {"mapped": "another host", "nixl": "no way"}, "another host; no way"),
        ("nixl", {"nixl": "no way"}, "no way"),
    ],
)
def test_the_transport_that_reaches_the_peer_is_chosen(theirs: str, faults: dict[str, str], expected: str) -> None:
    chosen, mapped, nixl = made(**faults)
    where = TransportAddress(theirs, [RANK])
    if set(faults) >= {"mapped", "nixl"} or expected == "no way":
        with pytest.raises(TransportError, match=expected):
            chosen.add_peer("peer", WHOLE, where)
        with pytest.raises(TransportError, match="not connected"):
            chosen.start("peer", "write", SPAN)
        return
    chosen.add_peer("peer", WHOLE, where)
    chosen.start("peer", "write", SPAN)
    assert (mapped if expected == "cuda-ipc" else nixl).started == ["write"]
    assert (nixl if expected == "cuda-ipc" else mapped).started == []


def test_nothing_is_staged_when_the_peer_is_mapped() -> None:
    chosen, _, nixl = made()
    nixl.staged_in = "device"
    chosen.add_peer("peer", replace(WHOLE, page_size=16), TransportAddress("cuda-ipc+nixl", [RANK]))
    assert chosen.staging_area("peer", Span([0], [0], 0, 4096)) is None
    chosen.add_peer("far", replace(WHOLE, page_size=16), TransportAddress("nixl", [RANK]))
    assert chosen.staging_area("far", Span([0], [0], 0, 4096)) == "device"


def test_a_peer_is_removed_from_both_transports() -> None:
    chosen, mapped, nixl = made()
    for engine_id, names in (("near", "cuda-ipc+nixl"), ("far", "nixl")):
        chosen.add_peer(engine_id, WHOLE, TransportAddress(names, [RANK]))
    mapped.lives = False
    chosen.tend()
    assert not nixl.reaches("near")
    assert nixl.reaches("far")


def refuse(error: Exception) -> Callable[..., Any]:
    def opened(*_: Any) -> Any:
        raise error

    return opened


@pytest.mark.parametrize(
    ("ipc", "nixl", "expected"),
    [
        (True, True, "cuda-ipc+nixl"),
        (False, True, "nixl"),
        (True, False, "cuda-ipc"),
        (False, False, "--kv-transport cuda-ipc"),
    ],
)
def test_auto_chooses_the_transports_that_work_on_the_gpu(
    ipc: bool, nixl: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, mapped_fake, nixl_fake = made()
    no_ipc, no_nixl = refuse(ModelError("no handle")), refuse(ImportError("no package"))
    monkeypatch.setattr(opening, "CudaIpcMemory", (lambda *_: None) if ipc else no_ipc)
    monkeypatch.setattr(opening, "MappedTransport", lambda *_: mapped_fake)
    monkeypatch.setattr(opening, "NixlTransport", (lambda *_: nixl_fake) if nixl else no_nixl)
    if not ipc and not nixl:
        with pytest.raises(ModelError, match=expected):
            opening.open_transport(TransportChoice("auto"), "x", MEMORY)
        return
    assert opening.open_transport(TransportChoice("auto"), "x", MEMORY).name == expected


def test_a_transport_is_refused_when_it_cannot_work_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "CudaIpcMemory", refuse(ModelError("no handle")))
    monkeypatch.setattr(opening, "NixlTransport", refuse(ImportError("no package")))
    for kind, message_part in (("cuda-ipc", "no handle"), ("nixl", "pip install"), ("shm", "main memory")):
        with pytest.raises(ModelError, match=message_part):
            opening.open_transport(TransportChoice(kind), "x", MEMORY)
