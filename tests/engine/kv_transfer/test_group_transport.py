"""A group's ranks move their own parts: real sockets, real NIXL, two groups of two ranks with numpy arrays as pools."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from msgspec.structs import replace

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.kv_transfer.layout import KVLayout, KVMemory, Span
from mini_infer_engine.kv_transfer.staging_slots import RECEIVE_SLOTS, SEND_SLOTS, StagingBuffer, chunks
from mini_infer_engine.kv_transfer.transport import (
    Motion,
    Motions,
    Progress,
    TransportChoice,
    TransportError,
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


def test_each_rank_writes_and_reads_its_own_heads(groups: Callable[[str, KVLayout], Group]) -> None:
    ours, theirs = groups("ours", LAYOUT), groups("theirs", LAYOUT)
    ours.meet(theirs)
    for rank, pool in enumerate(ours.pools):
        pool[:] = np.arange(pool.size, dtype=np.int32).reshape(pool.shape) + 1000 * rank + 1
    motion = ours.transport.start("theirs", "write", Span([3, 1], [0, 2], 0, 32))
    assert ended(motion) == "done"
    assert motion.num_bytes == 2 * LAYOUT.page_bytes * LAYOUT.tp_size
    for mine, other in zip(ours.pools, theirs.pools, strict=True):
        assert (other[[0, 2]] == mine[[3, 1]]).all()
        assert not other[[1, 3]].any()
        mine[:] = 0
    assert ended(ours.transport.start("theirs", "read", Span([1], [2], 0, 16))) == "done"
    for mine, other in zip(ours.pools, theirs.pools, strict=True):
        assert (mine[1] == other[2]).all()


def test_groups_of_other_sizes_cut_by_heads(groups: Callable[[str, KVLayout], Group]) -> None:
    whole = KVLayout(num_layers=2, halves=2, page_size=16, num_heads=4, head_bytes=4, dtype="int32")
    two, one = groups("two", LAYOUT), groups("one", whole)
    two.meet(one)
    for rank, pool in enumerate(two.pools):
        pool[:] = rank + 1
    assert ended(two.transport.start("one", "write", Span([0], [3], 0, 16))) == "done"
    assert (one.pools[0][3] == [1, 1, 2, 2]).all()


def test_groups_of_other_sizes_and_dtypes_move_through_slots(groups: Callable[[str, KVLayout], Group]) -> None:
    """Both ways: heads of two ranks are put together in one, and those of one are dealt out to two."""
    wide = replace(LAYOUT, dtype="float32", head_bytes=4)
    whole = KVLayout(num_layers=2, halves=2, page_size=32, num_heads=4, head_bytes=2, dtype="float16")
    two, one = groups("two", wide), groups("one", whole)
    two.meet(one)
    one.meet(two)
    for rank, pool in enumerate(two.pools):
        pool.view(np.float32)[:] = np.arange(pool.size).reshape(pool.shape) % 1000 + 0.5 + rank
    sizes = (NUM_PAGES, whole.num_layers, whole.halves, whole.page_size, whole.num_heads)
    cells = one.pools[0].view(np.float16).reshape(-1)[: int(np.prod(sizes))].reshape(sizes)
    area = two.transport.way("one", Span([], [], 0, 48))
    assert area == "host"
    span = Span([2, 0, 3], [], 0, 48)
    for part in chunks(wide, whole, span, two.transport.slot_bytes("one", area)):
        assert ended(two.transport.stage("one", area, 1, part)) == "done"
        assert ended(two.transport.push("one", area, 1, 9, part)) == "done"
        taken = one.transport.place("two", area, 9, Span([1, 3], [], part.begin, part.end, part.layers))
        assert ended(taken) == "done"
    for token in range(48):
        there = np.concatenate(
            [pool.view(np.float32)[span.our_pages[token // 16], :, :, token % 16] for pool in two.pools], -1
        )
        assert (cells[[1, 3][token // 32], :, :, token % 32] == there.astype(np.float16)).all()
    before = [pool.copy() for pool in two.pools]
    for pool in two.pools:
        pool[:] = 0
    for part in chunks(whole, wide, Span([1, 3], [], 0, 48), one.transport.slot_bytes("two", area)):
        assert ended(one.transport.stage("two", area, 0, part)) == "done"
        assert ended(one.transport.push("two", area, 0, 15, part)) == "done"
        back = two.transport.place("one", area, 15, Span(span.our_pages, [], part.begin, part.end, part.layers))
        assert ended(back) == "done"
    for pool, old in zip(two.pools, before, strict=True):
        rounded = old.view(np.float32).astype(np.float16).astype(np.float32)
        assert (pool.view(np.float32)[span.our_pages] == rounded[span.our_pages]).all()


def test_slots_are_written_to_at_once(groups: Callable[[str, KVLayout], Group]) -> None:
    ours, theirs = groups("ours", LAYOUT), groups("theirs", LAYOUT)
    ours.meet(theirs)
    theirs.meet(ours)
    for rank, pool in enumerate(theirs.pools):
        pool[:] = np.arange(NUM_PAGES)[:, None, None, None, None] + 10 * rank + 5
    slots = list(zip(range(NUM_PAGES), SEND_SLOTS, RECEIVE_SLOTS, strict=False))
    spans = [Span([page], [], 0, 16, (1, 2)) for page in range(NUM_PAGES)]  # what a slot holds
    given = [theirs.transport.stage("ours", "host", slot, span) for span, slot in zip(spans, SEND_SLOTS, strict=False)]
    assert [ended(motion) for motion in given] == ["done"] * NUM_PAGES
    pushed = [theirs.transport.push("ours", "host", slot, other, spans[page]) for page, slot, other in slots]
    assert [ended(motion) for motion in pushed] == ["done"] * NUM_PAGES
    taken = [ours.transport.place("theirs", "host", other, spans[page]) for page, _, other in slots]
    assert [ended(motion) for motion in taken] == ["done"] * NUM_PAGES
    for mine, other in zip(ours.pools, theirs.pools, strict=True):
        assert (mine[:, 1] == other[:, 1]).all()
        assert not mine[:, 0].any()


def test_a_slot_that_is_not_lent_is_not_written_to(groups: Callable[[str, KVLayout], Group]) -> None:
    ours, theirs = groups("ours", LAYOUT), groups("theirs", LAYOUT)
    ours.meet(theirs)
    span = Span([0], [], 0, 16)
    assert ended(ours.transport.stage("theirs", "host", 0, span)) == "done"
    with pytest.raises(TransportError, match="NIXL cannot write at theirs"):
        ours.transport.push("theirs", "host", 0, 1 << 20, span)


def test_a_rank_that_does_not_reach_the_peer_fails_the_whole(groups: Callable[[str, KVLayout], Group]) -> None:
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


def test_ranks_that_never_come_are_named() -> None:
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
def test_parts_end_together(first: Progress, second: Progress, begun: bool, expected: Progress) -> None:
    motions = Motions([_Part(first), _Part(second)], has_failed=not begun)
    assert motions.progress() == expected
    assert motions.num_bytes == 16


def test_a_rank_s_thread_has_its_gpu_before_it_registers_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
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
