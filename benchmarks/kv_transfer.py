"""Gigabytes a second between two engines' page pools: each transport against the link, by size of a piece.

    python benchmarks/kv_transfer.py --out FILE

Two processes hold a pool each, as engines do, on two GPUs where there are two, else on one, and in main memory. One
writes to the other's pool and reads from it. Beside it, in the same run: what goes through staging buffers, and what
the link does (a copy between the two GPUs, and between a GPU and pinned memory); without GPUs, a copy in main memory.
"""

import itertools
import multiprocessing
import os
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import msgspec
from common.budget import Budget
from common.report import log_line, make_parser, print_table, save, words

SIZES = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20, 7 << 20)
"""Bytes of a piece: 256 KB are a layer of a page of Qwen2.5-7B, 7 MB a whole page."""
PLACES = {  # name: (device, GPUs needed, whether each process sees its own GPU alone)
    "gpu to gpu": ("cuda", 2, False),
    "gpus that see themselves alone": ("cuda", 2, True),
    "on one gpu": ("cuda", 1, False),
    "host to host": ("cpu", 0, False),
}
TRANSPORTS = {"cuda": ("nixl", "cuda-ipc"), "cpu": ("nixl", "shm")}
"""As in --kv-transport."""
_REPEATS = 5
_numbers = itertools.count()
_SMALL = 16 << 10
_HOWS = ("write", "read")


def layout_of(piece: int) -> Any:
    """Of pages of so many bytes: a page is one piece."""
    from mini_infer_engine.kv_transfer.layout import KVLayout

    return KVLayout(num_layers=1, halves=1, page_size=16, num_heads=1, head_bytes=piece // 16, dtype="uint8")


def shape_of(page_size: int, dtype: str = "bfloat16") -> Any:
    """Of Qwen2.5-7B."""
    from mini_infer_engine.kv_transfer.layout import CONVERTIBLE, KVLayout

    return KVLayout(
        num_layers=28,
        halves=2,
        page_size=page_size,
        num_heads=4,
        head_bytes=128 * CONVERTIBLE[dtype],
        dtype=dtype,
    )


def make_pool(device: str, index: int, size: int) -> tuple[Any, int | None]:
    """Memory, as an engine has it, and the file that other processes map it by."""
    import torch

    from mini_infer_engine.kv_transfer.transports.shared_memory import SharedArray

    if device == "cuda":
        return torch.zeros(size, dtype=torch.uint8, device=torch.device("cuda", index)), None
    shared = SharedArray(size)
    return torch.from_numpy(shared.bytes), shared.file


def open_over(pool: tuple[Any, int | None], kind: str, layout: Any) -> tuple[str, Any]:
    """The name of an engine with such pages, and its transport."""
    from mini_infer_engine.kv_transfer.layout import KVMemory
    from mini_infer_engine.kv_transfer.transport import TransportChoice
    from mini_infer_engine.kv_transfer.transports.open_transport import open_transport

    memory, file = pool
    whole = KVMemory(
        address=memory.data_ptr(),
        num_pages=memory.numel() // layout.page_bytes,
        device=memory.device.type,
        device_index=memory.device.index or 0,
        layout=layout,
        file=file,
    )
    name = f"pool-{os.getpid()}-{next(_numbers)}"
    return name, open_transport(TransportChoice(kind), name, whole)


def serve_peer(connection: Connection, device: str, kind: str, index: int, visible: str | None, size: int) -> None:
    """The process that is written to and read from, until it is told to end."""
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    pool = make_pool(device, index, size)  # it lives as long as this process
    transport: Any = None
    peer = ""
    while (command := connection.recv()) is not None:
        if command == "take":  # what this peer stages
            take_all(connection, transport, peer)
            continue
        ours, theirs, peer, where = command
        if transport is not None:
            transport.close()
        name, transport = open_over(pool, kind, ours)
        transport.add_peer(peer, theirs, where)
        connection.send((name, transport.describe()))


def take_all(connection: Connection, transport: Any, peer: str) -> None:
    """Lend slots, put in place what is written there, and say so when there is no more."""
    from mini_infer_engine.kv_transfer.staging_slots import RECEIVE_SLOTS, Slots

    slots, slot_requests = Slots(RECEIVE_SLOTS), deque[tuple[int, str]]()
    granted: dict[int, tuple[str, int]] = {}
    placing: dict[int, Any] = {}
    progress = "done"
    is_open = True
    while is_open or placing:
        while is_open and connection.poll(0):
            match connection.recv():
                case ("ask", serial, area):
                    slot_requests.append((serial, area))
                case ("written", serial, span):
                    placing[serial] = transport.place(peer, *granted[serial], span)
                case _:
                    is_open = False
        while slot_requests and (slot := slots.take()) is not None:
            serial, area = slot_requests.popleft()
            granted[serial] = area, slot
            connection.send((serial, slot))
        for serial, motion in list(placing.items()):
            if (found := motion.progress()) != "busy":
                progress = found if found == "failed" else progress
                del placing[serial]
                slots.free(granted.pop(serial)[1])
    connection.send(progress)


def drive(
    connection: Connection,
    other: Connection,
    device: str,
    kind: str,
    visible: str | None,
    size: int,
    sizes: tuple[int, ...],
) -> None:
    """The process that writes and reads: sends rates by how and piece."""
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    pool = make_pool(device, 0, size)
    pool[0].fill_(7)
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
    found: dict[str, Any] = {}
    for piece in sizes:
        transport, peer = met(other, pool, kind, layout_of(piece), layout_of(piece))
        rates = {how: [_timed(transport, peer, how, size // piece) for _ in range(_REPEATS)] for how in _HOWS}
        found[str(piece)] = {how: size // piece * piece / median(seconds[1:]) for how, seconds in rates.items()}
        log_line(f"  {kind}, pieces of {piece}: {found[str(piece)]}")
        if piece == _SMALL:
            alone = {how: [_timed(transport, peer, how, 1) for _ in range(30)] for how in _HOWS}
            found["16 KB alone, us"] = {how: median(seconds[5:]) * 1e6 for how, seconds in alone.items()}
        transport.close()
    found["staged"] = staged_rates(other, pool, kind)
    connection.send(found)


def met(other: Connection, pool: tuple[Any, int | None], kind: str, ours: Any, theirs: Any) -> tuple[Any, str]:
    """A transport over our pool that knows the other process's, whose pages lie so, and its name."""
    name, transport = open_over(pool, kind, ours)
    other.send((theirs, ours, name, transport.describe()))
    peer, where = other.recv()
    transport.add_peer(peer, theirs, where)
    return transport, peer


STAGED = {  # name: (page size here, there, dtype there)
    "7B shape, pages of 128": (128, 128, "bfloat16"),
    "7B shape, pages of 128 into 16": (128, 16, "bfloat16"),
    "7B shape, into float32": (128, 128, "float32"),
}
_STAGED_TOKENS = 2048


def staged_rates(other: Connection, pool: tuple[Any, int | None], kind: str) -> dict[str, Any]:
    """Bytes a second by area, which only NIXL has; and directly where that is possible."""
    from mini_infer_engine.kv_transfer.layout import Span

    found: dict[str, dict[str, float]] = {}
    memory = pool[0]
    areas = () if kind != "nixl" else ("device", "host") if memory.is_cuda else ("host",)
    for label, (our_size, their_size, dtype) in STAGED.items():
        ours, theirs = shape_of(our_size), shape_of(their_size, dtype)
        if not areas and ours.dtype != theirs.dtype:
            continue
        tokens = min(_STAGED_TOKENS, memory.numel() // theirs.token_bytes // 128 * 128)
        transport, peer = met(other, pool, kind, ours, theirs)
        span = Span(list(range(tokens // our_size)), list(range(tokens // their_size)), 0, tokens)
        rates = {}
        if ours.dtype == theirs.dtype:
            rates["direct"] = median([_timed_span(transport, peer, span) for _ in range(_REPEATS)][1:])
        for area in areas:
            seconds = [_timed_staged(other, transport, peer, ours, theirs, span, area) for _ in range(_REPEATS)]
            rates[area] = median(seconds[1:])
        log_line(f"  {kind}, {label}: {rates}")
        found[label] = {path: tokens * ours.token_bytes / seconds for path, seconds in rates.items()}
        transport.close()
    return found


def _timed_span(transport: Any, peer: str, span: Any) -> float:
    begin = time.perf_counter()
    motion = transport.start(peer, "write", span)
    while (progress := motion.progress()) == "busy":
        pass
    if progress != "done":
        raise RuntimeError("a write has failed")
    return time.perf_counter() - begin


@dataclass(frozen=True, slots=True)
class ToHolder:
    """The channel to the other process (see `staged_gift.Channel`)."""

    other: Connection
    transport: Any
    peer: str
    layouts: tuple[Any, Any]
    area: str
    their_pages: list[int]

    def divide(self, span: Any) -> list[Any]:
        """See `Channel.divide`."""
        from mini_infer_engine.kv_transfer.staging_slots import chunks

        return chunks(*self.layouts, span, self.transport.slot_bytes(self.peer, self.area))

    def stage(self, slot: int, part: Any) -> Any:
        """See `Channel.stage`."""
        return self.transport.stage(self.peer, self.area, slot, part)

    def request_slot(self, serial: int) -> None:
        """See `Channel.request_slot`."""
        self.other.send(("ask", serial, self.area))

    def write(self, slot: int, their_slot: int, part: Any) -> Any:
        """See `Channel.write`."""
        return self.transport.push(self.peer, self.area, slot, their_slot, part)

    def report_written(self, serial: int, part: Any) -> None:
        """See `Channel.report_written`."""
        self.other.send(("written", serial, msgspec.structs.replace(part, our_pages=self.their_pages)))


def _timed_staged(other: Connection, transport: Any, peer: str, ours: Any, theirs: Any, span: Any, area: str) -> float:
    """Until all is in its place there. RuntimeError: something has failed."""
    from mini_infer_engine.kv_transfer.staging.staged_write import StagedWrite
    from mini_infer_engine.kv_transfer.staging_slots import SEND_SLOTS, Slots

    other.send("take")
    begin = time.perf_counter()
    channel = ToHolder(other, transport, peer, (ours, theirs), area, span.their_pages)
    write = StagedWrite(span, channel, Slots(SEND_SLOTS), itertools.count())
    while (progress := write.progress()) == "busy":
        while other.poll(0):
            write.grant_slot(*other.recv())
    other.send(None)
    if progress != "done" or other.recv() != "done":
        raise RuntimeError("what goes through slots has not arrived")
    return time.perf_counter() - begin


def _timed(transport: Any, peer: str, how: str, num_pages: int) -> float:
    """Seconds from the call to its end."""
    from mini_infer_engine.kv_transfer.layout import Span

    pages = list(range(num_pages))
    begin = time.perf_counter()
    motion = transport.start(peer, how, Span(pages, pages, 0, 16 * num_pages))
    while (progress := motion.progress()) == "busy":
        pass
    if progress != "done":
        raise RuntimeError(f"a {how} has failed")
    return time.perf_counter() - begin


def measure(device: str, kind: str, gpus: int, apart: bool, size: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Rates by piece and way; of gpu to gpu from the first GPU to the second."""
    context = multiprocessing.get_context("spawn")
    results, end = context.Pipe()
    ours, theirs = context.Pipe()
    peer_index, visible = (0, ("0", "1")) if apart else (max(0, gpus - 1), (None, None))
    holder = context.Process(target=serve_peer, args=(theirs, device, kind, peer_index, visible[1], size))
    driver = context.Process(target=drive, args=(end, ours, device, kind, visible[0], size, sizes))
    holder.start()
    driver.start()
    try:
        end.close()  # so that the driver's end is one of the connection
        if not results.poll(120):
            raise TimeoutError("no figures within two minutes")
        return dict(results.recv())
    finally:
        driver.join(5)
        for process in (driver, holder):
            process.kill()
            process.join()


def link(size: int) -> dict[str, float]:
    """Bytes a second of plain copies."""
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        source, target = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
        return {"memory copy": _copied(lambda: target.copy_(source), size, lambda: None)}
    first, second = (torch.zeros(size, dtype=torch.uint8, device=f"cuda:{min(index, gpus - 1)}") for index in range(2))
    pinned = torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    def wait() -> None:
        for index in range(min(2, gpus)):
            torch.cuda.synchronize(index)

    copy = "peer copy" if gpus > 1 else "copy on one gpu"
    return {
        copy: _copied(lambda: second.copy_(first, non_blocking=True), size, wait),
        "to pinned memory": _copied(lambda: pinned.copy_(first, non_blocking=True), size, wait),
        "from pinned memory": _copied(lambda: first.copy_(pinned, non_blocking=True), size, wait),
    }


def _copied(copy: Any, size: int, wait: Any) -> float:
    seconds = []
    for _ in range(_REPEATS + 2):
        wait()
        begin = time.perf_counter()
        copy()
        wait()
        seconds.append(time.perf_counter() - begin)
    return size / median(seconds[2:])


def main() -> None:
    """See the module."""
    parser = make_parser(__doc__)
    parser.add_argument("--pool-mb", type=int, default=448)
    parser.add_argument("--kinds", type=words, default=["nixl", "cuda-ipc", "shm"])
    parser.add_argument("--places", type=words, default=list(PLACES), help="of: " + ", ".join(PLACES))
    options = parser.parse_args()
    budget = Budget(options.time_limit_s)
    import torch

    size, sizes = (64 << 20, SIZES[:3]) if options.smoke else (options.pool_mb << 20, SIZES)
    result: dict[str, Any] = {"link": link(size), "transports": {}, "failures": {}}
    for (place, (device, gpus, apart)), turn in itertools.product(PLACES.items(), range(2)):
        kind = TRANSPORTS[device][turn]
        name = f"{kind}, {place}"
        is_selected = place in options.places and kind in options.kinds
        if torch.cuda.device_count() < gpus or not is_selected or not budget.allows("place", 20):
            continue
        with budget.spending("place"):
            try:
                result["transports"][name] = measure(device, kind, gpus, apart, size, sizes)
            except Exception as error:
                result["failures"][name] = f"{type(error).__name__}: {error}"
        log_line(f"{name}: {result['transports'].get(name) or result['failures'].get(name)}")
        save(options.out, result)
    save(options.out, result)
    rows = [[name, "", f"{rate / 1e9:.1f}", ""] for name, rate in result["link"].items()]
    staged = []
    for name, found in result["transports"].items():
        for label, rates in found.get("staged", {}).items():
            paths = ("direct", "device", "host")
            staged.append([name, label, *(f"{rates[path] / 1e9:.2f}" if path in rates else "" for path in paths)])
        for piece, rates in found.items():
            if piece == "staged":
                continue
            unit = 1.0 if piece.endswith("us") else 1e9
            rows.append([name, piece, *(f"{rates[how] / unit:.1f}" for how in ("write", "read"))])
    print_table(["GB/s", "piece", "write", "read"], rows)
    print_table(["GB/s", "pages", "directly", "staged on the GPU", "staged in main memory"], staged)


if __name__ == "__main__":
    main()
