"""The contract of `Transport`, which every implementation keeps: the same cases for each line of `SUBJECTS`.

Both engines are in this process; what needs another process is in the tests of one implementation.
"""

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import pytest
import torch
import zmq
from msgspec.structs import replace
from torch import Tensor

from mini_infer_engine.kv_transfer.cuda_driver import HANDLE_BYTES
from mini_infer_engine.kv_transfer.layout import KVLayout, KVMemory, Span
from mini_infer_engine.kv_transfer.protocol.wire import TransportAddress
from mini_infer_engine.kv_transfer.staging_slots import RECEIVE_SLOTS, SEND_SLOTS, chunks
from mini_infer_engine.kv_transfer.transport import (
    Digest,
    How,
    Motion,
    Progress,
    Transport,
    TransportChoice,
    TransportError,
)
from mini_infer_engine.kv_transfer.transports import cuda_ipc, nixl_transport
from mini_infer_engine.kv_transfer.transports.chosen_transport import ChosenTransport
from mini_infer_engine.kv_transfer.transports.group_transport import open_group_transport, serve_rank
from mini_infer_engine.kv_transfer.transports.mapped_transport import MappedTransport
from mini_infer_engine.kv_transfer.transports.nixl_transport import NixlTransport
from mini_infer_engine.kv_transfer.transports.open_transport import open_transport
from mini_infer_engine.kv_transfer.transports.shared_memory import HostMemory, SharedArray
from tests.gpu.device import GPU_ONLY

NUM_PAGES = 8
HEADS = 4
STAGING_BYTES = 4096
FAST = 1 << 30
"""Bytes per second of a paced link that delays no test."""
LAYOUT = KVLayout(num_layers=2, halves=2, page_size=16, num_heads=HEADS, head_bytes=4, dtype="float32")
names = (f"engine-{number}" for number in itertools.count())


@dataclass
class Side:
    """One engine: the pool of each rank [pages, layers, halves, page_size, heads], and the transport over them."""

    name: str
    layout: KVLayout
    pools: list[Tensor]
    transport: Transport

    def tokens(self, pages: Sequence[int], count: int) -> Tensor:
        """Returns the first `count` tokens of a sequence with these pages, [tokens, layers, halves, all heads].

        Ranks that have copies of the same heads must agree.
        """
        parts = [pool[list(pages)] for pool in self.pools]
        if self.layout.copies > 1:
            assert all(torch.equal(part, parts[0]) for part in parts)
            parts = parts[:1]
        whole = torch.cat(parts, -1)
        return whole.movedim(3, 1).flatten(0, 1)[:count].float().cpu()

    def fill(self, first: int) -> None:
        """Writes values that differ from token to token, layer to layer and head to head, and that fp16 can keep."""
        for rank, pool in enumerate(self.pools):
            values = torch.arange(pool.numel(), dtype=torch.float32).reshape(pool.shape)
            offset = 0 if self.layout.copies > 1 else rank * 131
            pool.copy_((values * 7 + offset + first) % 1999)
        if self.pools[0].is_cuda:
            torch.cuda.synchronize()

    def add(self, peer: "Side") -> None:
        self.transport.add_peer(peer.name, peer.layout, peer.transport.describe())


OpenRank = Callable[[str, KVMemory], Transport]


@dataclass(frozen=True)
class Subject:
    """An implementation: how to open it over a pool, or over the pools of several ranks."""

    choice: TransportChoice
    ranks: int = 1
    device: str = "cpu"
    open_one: OpenRank | None = None
    """Opens the transport of a single rank, where the choice alone would open another one on this machine."""
    converts: bool = False
    """True if it converts between the floating-point dtypes of two engines."""

    def regrouped(self) -> "Subject":
        """Returns a peer with another number of ranks. Tests have one GPU: ranks on GPUs have a peer of one rank."""
        ranks = 1 if self.ranks > 1 or self.device != "cpu" else 2
        return self if ranks == self.ranks else Subject(self.group_choice, ranks)

    @property
    def group_choice(self) -> TransportChoice:
        """The choice that a peer of several ranks makes; its ranks cannot open a transport that is passed here."""
        return self.choice if self.open_one is None else choice("nixl")

    def side(self, *, latent: bool = False, **changes: object) -> Side:
        """Opens an engine. With `latent` its pool is that of MLA: one half, and the same latents on all ranks."""
        name, heads = next(names), {"num_heads": HEADS // self.ranks}
        if latent:
            heads = {"num_heads": 1, "halves": 1, "copies": self.ranks}
        layout = replace(LAYOUT, tp_size=self.ranks, **(heads | changes))
        made = [self._pool(layout) for _ in range(self.ranks)]
        memories = [memory for _, memory in made]
        if self.ranks > 1:
            transport: Transport = self._group(name, memories)
        elif self.open_one is not None:
            transport = self.open_one(name, memories[0])
        else:
            transport = open_transport(self.choice, name, memories[0])
        transport.enter_thread()
        return Side(name, layout, [pool for pool, _ in made], transport)

    def _pool(self, layout: KVLayout) -> tuple[Tensor, KVMemory]:
        num_bytes, file = NUM_PAGES * layout.page_bytes, None
        if self.device == "cuda":
            cells = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
        else:
            shared = SharedArray(num_bytes)
            cells, file = torch.from_numpy(shared.bytes), shared.file
        sizes = (NUM_PAGES, layout.num_layers, layout.halves, layout.page_size, layout.num_heads)
        memory = KVMemory(
            address=cells.data_ptr(),
            num_pages=NUM_PAGES,
            device="cuda" if self.device == "cuda" else "cpu",
            device_index=cells.device.index or 0,
            layout=layout,
            file=file,
        )
        return cells.view(getattr(torch, layout.dtype)).view(sizes), memory

    def _group(self, name: str, memories: list[KVMemory]) -> Transport:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        router = context.socket(zmq.ROUTER)
        router.bind(f"inproc://{name}")
        for rank in range(1, self.ranks):
            socket = context.socket(zmq.DEALER)
            socket.set(zmq.IDENTITY, str(rank).encode())
            socket.set(zmq.LINGER, 0)
            socket.connect(f"inproc://{name}")
            serve_rank(socket, self.choice, name, memories[rank], rank)
        return open_group_transport(self.choice, name, memories[0], self.ranks, router, lambda: "")


def choice(kind: str, **more: int) -> TransportChoice:
    return TransportChoice(kind, STAGING_BYTES, **more)


def chosen(name: str, memory: KVMemory) -> Transport:
    mapped = MappedTransport(HostMemory(memory), memory)
    return ChosenTransport(mapped, NixlTransport(choice("nixl"), name, memory), memory)


class OwnMemoryDriver:
    """CUDA's driver opens no handle in the process that made it: this one returns the memory itself."""

    sizes: ClassVar[dict[int, int]] = {}
    """Bytes of each pool."""

    def range_of(self, address: int) -> tuple[int, int]:
        return address, self.sizes[address]

    def handle_of(self, address: int) -> bytes:
        return address.to_bytes(HANDLE_BYTES, "little")

    def open(self, handle: bytes) -> int:
        return int.from_bytes(handle, "little")

    def close(self, address: int) -> None:
        """Has nothing to unmap."""


def cuda_ipc_in_one_process(name: str, memory: KVMemory) -> Transport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_ipc, "CudaDriver", OwnMemoryDriver)
        OwnMemoryDriver.sizes[memory.address] = memory.size
        return open_transport(choice("cuda-ipc"), name, memory)


def has_nixl() -> bool:
    with contextlib.suppress(ImportError):
        return nixl_transport.load_nixl() is not None
    return False


NIXL = [pytest.mark.skipif(not has_nixl(), reason="needs NIXL: pip install nixl-cu13")]
SUBJECTS = [
    pytest.param(Subject(choice("shm")), id="shm"),
    pytest.param(Subject(choice("shm", bytes_per_s=FAST)), id="paced shm"),
    pytest.param(Subject(choice("shm"), ranks=2), id="shm of two ranks"),
    pytest.param(Subject(choice("nixl"), converts=True), id="nixl", marks=NIXL),
    pytest.param(Subject(choice("nixl-host"), converts=True), id="nixl-host", marks=NIXL),
    pytest.param(Subject(choice("nixl", bytes_per_s=FAST), converts=True), id="paced nixl", marks=NIXL),
    pytest.param(Subject(choice("nixl"), ranks=2, converts=True), id="nixl of two ranks", marks=NIXL),
    pytest.param(Subject(choice("auto"), open_one=chosen, converts=True), id="shm or nixl", marks=NIXL),
    pytest.param(Subject(choice("nixl"), device="cuda", converts=True), id="nixl on a GPU", marks=[*NIXL, *GPU_ONLY]),
    pytest.param(
        Subject(choice("cuda-ipc"), device="cuda", open_one=cuda_ipc_in_one_process), id="cuda-ipc", marks=GPU_ONLY
    ),
]


@dataclass
class Pair:
    """Two engines that reach each other; sides with other layouts are opened when a test needs them."""

    subject: Subject
    ours: Side
    theirs: Side
    others: dict[str, Side] = field(default_factory=dict)

    def other(self, subject: Subject | None = None, **changes: Any) -> Side:
        key = str((subject, changes))
        if key not in self.others:
            self.others[key] = (subject or self.subject).side(**changes)
        return self.others[key]


@pytest.fixture(scope="module", params=SUBJECTS)
def opened(request: pytest.FixtureRequest) -> Iterator[Pair]:
    subject: Subject = request.param
    pair = Pair(subject, subject.side(), subject.side())
    yield pair
    for side in (pair.ours, pair.theirs, *pair.others.values()):
        side.transport.close()


@pytest.fixture
def pair(opened: Pair) -> Pair:
    opened.ours.add(opened.theirs)
    opened.theirs.add(opened.ours)
    opened.ours.fill(1)
    opened.theirs.fill(1000)
    return opened


def ended(motion: Motion | Digest) -> Progress:
    limit_s = time.monotonic() + 60
    while (progress := motion.progress()) == "busy" and time.monotonic() < limit_s:
        time.sleep(0.0005)
    return progress


def move(how: How, ours: Side, theirs: Side, span: Span) -> None:
    """Moves a span as a producer and a consumer do: directly, or through slots where `staging_area` names a buffer."""
    if (area := ours.transport.staging_area(theirs.name, span)) is None:
        assert ended(ours.transport.start(theirs.name, how, span)) == "done"
        return
    mirrored = Span(span.their_pages, span.our_pages, span.begin, span.end, span.layers)
    producer, consumer, gathered = (ours, theirs, span) if how == "write" else (theirs, ours, mirrored)
    size = producer.transport.slot_bytes(consumer.name, area)
    slots = zip(itertools.cycle(SEND_SLOTS), itertools.cycle(RECEIVE_SLOTS), strict=False)
    for part, (slot, their_slot) in zip(chunks(producer.layout, consumer.layout, gathered, size), slots, strict=False):
        assert ended(producer.transport.stage(consumer.name, area, slot, part)) == "done"
        assert ended(producer.transport.push(consumer.name, area, slot, their_slot, part)) == "done"
        placed = Span(gathered.their_pages, [], part.begin, part.end, part.layers)
        assert ended(consumer.transport.place(producer.name, area, their_slot, placed)) == "done"


HOWS: list[How] = ["write", "read"]


@pytest.mark.parametrize("how", HOWS)
def test_tokens_arrive_and_nothing_else_changes_when_pages_are_equal(pair: Pair, how: How) -> None:
    ours, theirs = pair.ours, pair.theirs
    source, target = (ours, theirs) if how == "write" else (theirs, ours)
    sources, targets = ([3, 1], [0, 2]) if how == "write" else ([0, 2], [3, 1])
    before = [pool.clone() for pool in (*source.pools, *target.pools)]
    move(how, ours, theirs, Span([3, 1], [0, 2], 0, 32))
    assert torch.equal(target.tokens(targets, 32), source.tokens(sources, 32))
    untouched = [page for page in range(NUM_PAGES) if page not in targets]
    for pool, old in zip((*source.pools, *target.pools), before, strict=True):
        assert torch.equal(pool[untouched], old[untouched])


@pytest.mark.parametrize("how", HOWS)
def test_bytes_of_all_ranks_are_counted_when_a_motion_is_done(pair: Pair, how: How) -> None:
    motion = pair.ours.transport.start(pair.theirs.name, how, Span([3, 1], [0, 2], 0, 32))
    assert ended(motion) == "done"
    assert motion.num_bytes == 2 * pair.ours.layout.page_bytes * pair.subject.ranks


def test_an_ended_motion_keeps_its_state_when_it_is_polled_again(pair: Pair) -> None:
    motion = pair.ours.transport.start(pair.theirs.name, "write", Span([0], [0], 0, 16))
    assert [ended(motion) for _ in range(3)] == ["done"] * 3


def test_only_some_layers_move_when_a_span_names_layers(pair: Pair) -> None:
    old = pair.theirs.tokens([4], 16)
    move("write", pair.ours, pair.theirs, Span([5], [4], 0, 16, (1, 2)))
    now = pair.theirs.tokens([4], 16)
    assert torch.equal(now[:, 1], pair.ours.tokens([5], 16)[:, 1])
    assert torch.equal(now[:, 0], old[:, 0])


def test_several_motions_end_when_they_are_in_flight_together(pair: Pair) -> None:
    spans = [Span([page], [NUM_PAGES - 1 - page], 0, 16) for page in range(NUM_PAGES)]
    motions = [pair.ours.transport.start(pair.theirs.name, "write", span) for span in spans]
    assert [ended(motion) for motion in reversed(motions)] == ["done"] * NUM_PAGES
    pages = list(range(NUM_PAGES))
    assert torch.equal(pair.theirs.tokens(pages[::-1], 16 * NUM_PAGES), pair.ours.tokens(pages, 16 * NUM_PAGES))


@pytest.mark.parametrize("how", HOWS)
def test_tokens_arrive_when_page_sizes_differ(pair: Pair, how: How) -> None:
    check_tokens_arrive(pair.ours, pair.other(page_size=32), how)


@pytest.mark.parametrize("how", HOWS)
def test_every_head_arrives_when_the_numbers_of_ranks_differ(pair: Pair, how: How) -> None:
    check_tokens_arrive(pair.ours, pair.other(pair.subject.regrouped(), page_size=32), how)


@pytest.mark.parametrize("how", HOWS)
def test_latents_arrive_on_every_rank_when_the_numbers_of_ranks_differ(pair: Pair, how: How) -> None:
    ours = pair.other(latent=True)
    ours.fill(1)
    check_tokens_arrive(ours, pair.other(pair.subject.regrouped(), latent=True, page_size=32), how)


@pytest.mark.parametrize("how", HOWS)
def test_tokens_are_converted_or_the_peer_is_refused_when_dtypes_differ(pair: Pair, how: How) -> None:
    other = pair.other(pair.subject.regrouped(), page_size=32, dtype="float16", head_bytes=2)
    if pair.subject.converts:
        check_tokens_arrive(pair.ours, other, how)
        assert pair.ours.transport.staging_area(other.name, Span([], [], 0, 32)) is not None, "bytes are not values"
        return
    with pytest.raises(TransportError, match="float16"):
        pair.ours.add(other)


def check_tokens_arrive(ours: Side, other: Side, how: How) -> None:
    """Moves 41 tokens, which end within a page of either size."""
    ours.add(other)
    other.add(ours)
    other.fill(500)
    pages, theirs = [6, 0, 3], [2, 1]
    expected = ours.tokens(pages, 41) if how == "write" else other.tokens(theirs, 41)
    move(how, ours, other, Span(pages, theirs, 0, 41))
    assert torch.equal(ours.tokens(pages, 41), expected)
    assert torch.equal(other.tokens(theirs, 41), expected)
    (giver, sent), (taker, arrived) = (ours, pages), (other, theirs)
    if how == "read":
        (giver, sent), (taker, arrived) = (taker, arrived), (giver, sent)
    known = digest_of(giver, sent, 41, taker.layout)
    assert digest_of(taker, arrived, 41) == known
    parts = [digest_of(giver, sent, end, taker.layout, begin) for begin, end in ((0, 16), (16, 32), (32, 41))]
    assert sum(parts) % (1 << 64) == known


def digest_of(side: Side, pages: list[int], end: int, consumer: KVLayout | None = None, begin: int = 0) -> int:
    """Returns the digest of a side's tokens, as that side computes it for the consumer or for itself."""
    digest = side.transport.digest(Span(pages, [], begin, end), consumer)
    assert ended(digest) == "done"
    return digest.value


def test_a_digest_differs_when_any_bit_of_a_token_is_flipped_or_tokens_are_exchanged(pair: Pair) -> None:
    side, pages, draw = pair.ours, [5, 2], random.Random(7)
    known = digest_of(side, pages, 21)
    for _ in range(60):
        pool, page, offset = draw.choice(side.pools), *divmod(draw.randrange(21), 16)
        words = pool.view(torch.int32)
        place = pages[page], draw.randrange(2), draw.randrange(2), offset, draw.randrange(pool.shape[-1])
        bit = 1 << draw.randrange(31)
        words[place] ^= bit
        if side.pools[0].is_cuda:
            torch.cuda.synchronize()
        assert digest_of(side, pages, 21) != known
        words[place] ^= bit
    for pool in side.pools:
        pool.view(torch.int32)[pages[1], 0, 0, 5:] ^= 1 << 7  # behind the last token: another sequence's
    assert digest_of(side, pages, 21) == known
    assert digest_of(side, pages[::-1], 21) != known
    assert digest_of(side, pages, 21, begin=1) != known


@pytest.mark.parametrize(("our_page", "their_page"), [(0, NUM_PAGES), (0, -1), (NUM_PAGES, 0), (0, 1 << 40)], ids=str)
@pytest.mark.parametrize("how", HOWS)
def test_nothing_is_copied_when_a_page_is_outside_its_pool(
    pair: Pair, how: How, our_page: int, their_page: int
) -> None:
    sides = pair.ours, pair.theirs
    before = [pool.clone() for side in sides for pool in side.pools]
    try:
        motion = pair.ours.transport.start(pair.theirs.name, how, Span([our_page], [their_page], 0, 16))
    except TransportError:
        pass
    else:
        assert ended(motion) == "failed"
    assert all(map(torch.equal, [pool for side in sides for pool in side.pools], before))
    pair.ours.add(pair.theirs)
    move(how, pair.ours, pair.theirs, Span([0], [0], 0, 16))


def test_transfers_are_refused_when_the_peer_was_never_added_or_was_removed(pair: Pair) -> None:
    span = Span([0], [0], 0, 16)
    pair.ours.transport.remove_peer(pair.theirs.name)
    for name in ("nobody", pair.theirs.name):
        assert refused(lambda name=name: pair.ours.transport.start(name, "write", span))  # type: ignore[misc]
        with pytest.raises(TransportError):
            pair.ours.transport.slot_bytes(name, "host")
    pair.ours.add(pair.theirs)
    move("write", pair.ours, pair.theirs, span)


def refused(begin: Callable[[], Motion]) -> bool:
    """Returns True if a transfer raises TransportError or fails; one that is queued cannot raise."""
    try:
        return ended(begin()) == "failed"
    except TransportError:
        return True


def test_nothing_happens_when_an_unknown_peer_is_removed(pair: Pair) -> None:
    pair.ours.transport.remove_peer("nobody")
    move("write", pair.ours, pair.theirs, Span([0], [0], 0, 16))


def test_transfers_go_on_when_a_peer_is_added_again(pair: Pair) -> None:
    motion = pair.ours.transport.start(pair.theirs.name, "write", Span([0], [0], 0, 16))
    pair.ours.add(pair.theirs)
    assert ended(motion) == "done"
    move("write", pair.ours, pair.theirs, Span([1], [1], 0, 16))


def test_transfers_go_on_when_the_transport_is_tended_and_peers_live(pair: Pair) -> None:
    for _ in range(3):
        pair.ours.transport.tend()
    move("write", pair.ours, pair.theirs, Span([1], [1], 0, 16))


def test_a_peer_is_refused_when_its_address_leads_nowhere(pair: Pair) -> None:
    where = pair.theirs.transport.describe()
    nowhere = TransportAddress(
        where.transport, [replace(rank, metadata=b"none", address=0, shared=None) for rank in where.ranks]
    )
    with pytest.raises(TransportError):
        pair.ours.transport.add_peer("nowhere", pair.theirs.layout, nowhere)
    assert refused(lambda: pair.ours.transport.start("nowhere", "write", Span([0], [0], 0, 16)))
    move("write", pair.ours, pair.theirs, Span([0], [0], 0, 16))


def test_slots_are_separate_when_several_are_filled_at_once(pair: Pair) -> None:
    """A transport without staging buffers refuses each of their methods."""
    ours, theirs = pair.ours.transport, pair.theirs.transport
    spans = [Span([page], [], 0, 16, (1, 2)) for page in range(4)]
    try:
        ours.slot_bytes(pair.theirs.name, "host")
    except TransportError:
        assert ours.staging_area(pair.theirs.name, spans[0]) is None
        for begin in (
            lambda: ours.stage(pair.theirs.name, "host", 0, spans[0]),
            lambda: ours.push(pair.theirs.name, "host", 0, 8, spans[0]),
            lambda: ours.place(pair.theirs.name, "host", 8, spans[0]),
        ):
            assert refused(begin)
        return
    old = pair.theirs.tokens(range(4), 64)
    slots = list(zip(spans, SEND_SLOTS, RECEIVE_SLOTS, strict=False))
    staged = [ours.stage(pair.theirs.name, "host", slot, span) for span, slot, _ in slots]
    assert [ended(motion) for motion in staged] == ["done"] * 4
    pushed = [ours.push(pair.theirs.name, "host", slot, other, span) for span, slot, other in slots]
    assert [ended(motion) for motion in pushed] == ["done"] * 4
    placed = [theirs.place(pair.ours.name, "host", other, span) for span, _, other in slots]
    assert [ended(motion) for motion in placed] == ["done"] * 4
    assert torch.equal(pair.theirs.tokens(range(4), 64)[:, 1], pair.ours.tokens(range(4), 64)[:, 1])
    assert torch.equal(pair.theirs.tokens(range(4), 64)[:, 0], old[:, 0])
    assert refused(lambda: ours.push(pair.theirs.name, "host", 0, 1 << 20, spans[0]))
    pair.ours.add(pair.theirs)


def test_a_transport_address_survives_encoding(pair: Pair) -> None:
    where = pair.ours.transport.describe()
    assert where.transport == pair.ours.transport.name
    assert len(where.ranks) == pair.subject.ranks
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(where), type=TransportAddress) == where
