"""A group's ranks move their own parts: real sockets, real NIXL, two groups of two ranks with numpy arrays as pools."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import zmq

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.kv_transfer.layout import KVLayout, KVMemory, Span
from mini_infer_engine.kv_transfer.staging_slots import StagingBuffer
from mini_infer_engine.kv_transfer.transport import (
    Motion,
    Motions,
    Progress,
    TransportChoice,
)
from mini_infer_engine.kv_transfer.transports import nixl_transport
from mini_infer_engine.kv_transfer.transports.group_transport import GroupTransport, open_group_transport, serve_rank

LAYOUT = KVLayout(num_layers=2, halves=2, page_size=16, num_heads=2, head_bytes=4, dtype="int32", tp_size=2)
NUM_PAGES = 4


class Group:
    """Two ranks of one engine; the second one's thread is in this process, too."""

    def __init__(self, name: str, layout: KVLayout = LAYOUT, staging_bytes: int = 4096) -> None:
        self.layout, self.staging_bytes = layout, staging_bytes
        sizes = (NUM_PAGES, layout.num_layers, layout.halves, layout.page_size, layout.num_heads)
        self.pools = [np.zeros(sizes, np.int32) for _ in range(layout.tp_size)]
        self.name = name
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        router = context.socket(zmq.ROUTER)
        router.set(zmq.LINGER, 0)
        address = f"inproc://{name}"
        router.bind(address)
        for rank in range(1, layout.tp_size):
            socket = context.socket(zmq.DEALER)
            socket.set(zmq.IDENTITY, str(rank).encode())
            socket.set(zmq.LINGER, 0)
            socket.connect(address)
            serve_rank(socket, TransportChoice("nixl", self.staging_bytes), name, self.memory(rank), rank)
        self.transport: GroupTransport = open_group_transport(
            TransportChoice("nixl", self.staging_bytes), name, self.memory(0), layout.tp_size, router, lambda: ""
        )

    def memory(self, rank: int) -> KVMemory:
        address = self.pools[rank].ctypes.data
        return KVMemory(address=address, num_pages=NUM_PAGES, device="cpu", device_index=0, layout=self.layout)

    def meet(self, other: "Group") -> None:
        self.transport.add_peer(other.name, other.layout, other.transport.describe())


@pytest.fixture
def groups() -> Iterator[Callable[[str, KVLayout], Group]]:
    with ExitStack() as stack:

        def make(name: str, layout: KVLayout) -> Group:
            group = Group(name, layout)
            stack.callback(group.transport.close)
            return group

        yield make


def ended(motion: Motion) -> Progress:
    limit_s = time.monotonic() + 60
    while (progress := motion.progress()) == "busy" and time.monotonic() < limit_s:
        time.sleep(0.001)
    return progress


def test_a_group_transfer_fails_when_one_rank_does_not_reach_the_peer(groups: Callable[[str, KVLayout], Group]) -> None:
    ours, theirs = groups("ours", LAYOUT), groups("theirs", LAYOUT)
    where = theirs.transport.describe()
    broken = type(where)(
        where.transport,
        [
            where.ranks[0],
            type(where.ranks[0])(metadata=b"none", address=0, device="cpu", device_index=0, place=where.ranks[0].place),
        ],
    )
    ours.transport.add_peer("theirs", LAYOUT, broken)
    assert ended(ours.transport.start("theirs", "write", Span([0], [0], 0, 16))) == "failed"
    ours.transport.remove_peer("theirs")
    ours.meet(theirs)
    assert ended(ours.transport.start("theirs", "write", Span([0], [0], 0, 16))) == "done"


def test_the_error_names_ranks_when_they_do_not_connect() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(zmq.ROUTER) as router:
        router.bind("inproc://nobody")
        pool = np.zeros(NUM_PAGES * LAYOUT.page_bytes, np.uint8)
        memory = KVMemory(address=pool.ctypes.data, num_pages=NUM_PAGES, device="cpu", device_index=0, layout=LAYOUT)
        with pytest.raises(ModelError, match="rank 1 has died"):
            open_group_transport(TransportChoice(), "lonely", memory, 2, router, lambda: "rank 1 has died")


class _Part:
    num_bytes = 8

    def __init__(self, *progress: Progress) -> None:
        self._progress = iter(progress)

    def progress(self) -> Progress:
        return next(self._progress)


@pytest.mark.parametrize(
    ("first", "second", "begun", "expected"),
    [
        ("done", "done", True, "done"),
        ("done", "busy", True, "busy"),
        ("failed", "busy", True, "busy"),  # pages change until the last one has ended
        ("failed", "done", True, "failed"),
        ("done", "done", False, "failed"),
    ],
)
def test_a_group_transfer_ends_when_all_parts_have_ended(
    first: Progress, second: Progress, begun: bool, expected: Progress
) -> None:
    motions = Motions([_Part(first), _Part(second)], has_failed=not begun)
    assert motions.progress() == expected
    assert motions.num_bytes == 16


def test_a_ranks_thread_sets_its_gpu_before_it_registers_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a new thread, whose current device would be the first: UCX opens and registers in that one's context."""
    calls: list[str] = []

    class Agent:
        backends = ("UCX",)

        def __init__(self, name: str, _: object) -> None:
            calls.append(f"agent {name}")

        def register_memory(self, region: list[tuple[int, int, int, str]], segment: str) -> None:
            calls.append(f"{segment} of device {region[0][2]}")

    binding = SimpleNamespace(nixlAgent=None)
    nixl = SimpleNamespace(nixl_agent=Agent, nixl_agent_config=lambda **_: None, nixlBind=binding)
    monkeypatch.setattr(nixl_transport, "load_nixl", lambda: nixl)
    monkeypatch.setattr(nixl_transport.PoolDigests, "prepare", lambda _: None)
    monkeypatch.setattr("torch.cuda.set_device", lambda index: calls.append(f"set device {index}"))
    buffer = StagingBuffer(address=0, slot_bytes=1, device="cuda", device_index=1)

    def staging(_: KVMemory, area: str, num_bytes: int) -> SimpleNamespace:
        calls.append(f"{area} buffer")
        return SimpleNamespace(buffer=buffer, num_bytes=num_bytes)

    monkeypatch.setattr(nixl_transport, "NixlStaging", staging)
    memory = KVMemory(address=1 << 20, num_pages=NUM_PAGES, device="cuda", device_index=1, layout=LAYOUT)
    nixl_transport.NixlTransport(TransportChoice(), "x", memory, 1)
    assert calls == [
        "set device 1",
        "agent x/1",
        "VRAM of device 1",
        "device buffer",
        "host buffer",
        *["VRAM of device 1"] * 2,
    ]
