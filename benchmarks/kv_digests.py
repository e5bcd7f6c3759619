"""Measures digests beside the copies that they prove: transfers by CUDA IPC, and swapping to pinned memory.

    python benchmarks/kv_digests.py --model qwen2.5-7b --out FILE

Each digest is the whole path that serves: for a swap what is recorded of pages that leave, and the comparison of those
that are back. Columns, each the fewest milliseconds of six runs:

    copy      the copy of the same tokens alone: the kernel that moves pages from pool to pool on one GPU, or the copies
              between the GPU and pinned memory
    digest    the digest alone, from the call until its result is known, without the pauses of whoever polls for it
    host      the part of that until the call has returned
    device    the part that the GPU needs, between events on its stream, while the host is ahead
    both      the copy and then the digest: that of a swap is queued behind its copies, that of a transfer begins when
              all bytes are there

`share` is `digest` over `copy`, `added` what `both` takes longer than `copy`, over `copy`, and `of_link` is `digest`
over the time of a copy at 50 GB/s. Before each run the GPU's L2 cache is filled with other memory. Without a GPU copies
and digests are in main memory.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from common.report import integers, make_parser, print_table, save

from mini_infer_engine.kv_transfer.layout import KVLayout, KVMemory, Span
from mini_infer_engine.kv_transfer.pool_digests import PoolDigests
from mini_infer_engine.kv_transfer.transports.cuda_ipc import CudaIpcMemory
from mini_infer_engine.kv_transfer.transports.shared_memory import HostMemory, SharedArray
from mini_infer_engine.runtime.memory.swap_digests import SwapCheck, SwapDigests

SHAPES = {
    "qwen2.5-7b": KVLayout(num_layers=28, halves=2, page_size=128, num_heads=4, head_bytes=256, dtype="bfloat16"),
    "8b": KVLayout(num_layers=32, halves=2, page_size=128, num_heads=8, head_bytes=256, dtype="bfloat16"),
}
_REPEATS = 7
_LINK_BYTES_PER_S = 50e9
_CACHED_BYTES = 256 << 20
"""Several times the L2 cache of any GPU."""
_SLEEP_CYCLES = 4_000_000
"""About 2 ms, in which the host queues a digest."""

Begin = Callable[[], Callable[[], object]]
"""Begins a copy or a digest, and returns what waits for its end."""


def main() -> None:
    """Measures, prints a table, and writes a JSON file."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--lengths", default="512,2048,4096,16384", help="tokens")
    args = parser.parse_args()
    lengths = [256] if args.smoke else integers(args.lengths)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.smoke else "cpu")
    clock = Clock(device)
    rows = [row for length in lengths for row in measure(SHAPES[args.model], length, device, clock)]
    save(args.out, {"model": args.model, "device": str(device), "rows": rows})
    print_table(list(rows[0]), [list(row.values()) for row in rows])


def measure(layout: KVLayout, tokens: int, device: torch.device, clock: "Clock") -> list[dict[str, Any]]:
    """Returns the times of one length."""
    num_pages, on_gpu = -(-tokens // layout.page_size), device.type == "cuda"
    sizes = 2 * num_pages, layout.page_bytes
    shared = None if on_gpu else SharedArray(sizes[0] * sizes[1])
    pool = torch.empty(sizes, dtype=torch.uint8, device=device) if shared is None else torch.from_numpy(shared.bytes)
    pool = pool.view(sizes).random_(0, 256)
    memory = KVMemory(
        address=pool.data_ptr(),
        num_pages=2 * num_pages,
        device="cuda" if on_gpu else "cpu",
        device_index=0,
        layout=layout,
        file=None if shared is None else shared.file,
    )
    order = random.Random(1).sample(range(num_pages), num_pages)
    digests, span = PoolDigests(memory), Span(order, [], 0, tokens)
    digests.prepare()
    mapped = CudaIpcMemory(memory) if on_gpu else HostMemory(memory)
    pieces = np.array([[page, num_pages + place] for place, page in enumerate(order)]) * layout.page_bytes

    def transfer() -> Callable[[], object]:
        is_done = mapped.copy(pieces + memory.address, layout.page_bytes)
        return lambda: spin(is_done)

    def prove() -> Callable[[], object]:
        made = digests.begin(span, None)
        return lambda: spin(lambda: made.progress() == "done")

    words: Any = digests._words
    rows = [row("transfer", tokens, layout, clock.times(transfer, prove, words._stream if on_gpu else None))]

    host = torch.empty((num_pages, layout.page_bytes), dtype=torch.uint8, pin_memory=on_gpu)
    swapped, places = SwapDigests([pool.view(torch.int64)], num_pages), list(range(num_pages))
    swapped.prepare()

    def out() -> Callable[[], object]:
        for place, page in enumerate(order):
            host[place].copy_(pool[page], non_blocking=True)
        return clock.wait

    def left() -> Callable[[], object]:
        swapped.left(order, places)
        return clock.wait

    def back() -> Callable[[], object]:
        for place, page in enumerate(order):
            pool[page].copy_(host[place], non_blocking=True)
        return clock.wait

    def returned() -> Callable[[], object]:
        return SwapCheck([swapped.returned(order, places)]).faults

    stream = torch.cuda.current_stream() if on_gpu else None
    for way, copy, digest in (("out", out, left), ("in", back, returned)):
        rows.append(row(f"swap {way}", tokens, layout, clock.times(copy, digest, stream)))
    assert not returned()(), "pages have changed on their way"
    return rows


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a copy and of its digest, as the module explains them."""

    copy: float
    digest: float
    host: float
    device: float
    both: float


class Clock:
    """Measures what runs on a device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._cached = torch.zeros(_CACHED_BYTES if self._on_gpu else 0, dtype=torch.uint8, device=device)

    def times(self, copy: Begin, digest: Begin, stream: Any) -> Times:
        """Measures a copy, and its digest on a stream; None stands for a CPU."""

        def both() -> Callable[[], object]:
            wait = copy()
            if stream is None or stream != torch.cuda.current_stream():
                wait()  # otherwise the digest is queued behind it
            return digest()

        whole, host = self._best(digest)
        device = whole if stream is None else self._device_s(digest, stream)
        return Times(self._best(copy)[0], whole, host, device, self._best(both)[0])

    def wait(self) -> None:
        """Waits until the device has done all."""
        if self._on_gpu:
            torch.cuda.synchronize()

    def _best(self, begin: Begin) -> tuple[float, float]:
        """Returns the fewest seconds of several runs, until the end and until `begin` has returned."""
        ended, returned = [], []
        for _ in range(_REPEATS):
            self._make_cold()
            begin_s = time.perf_counter()
            wait = begin()
            returned.append(time.perf_counter() - begin_s)
            wait()
            ended.append(time.perf_counter() - begin_s)
        return min(ended[1:]), min(returned[1:])

    def _device_s(self, begin: Begin, stream: Any) -> float:
        """Returns the fewest seconds that the device needs when the host is ahead of it."""
        times = []
        for _ in range(_REPEATS):
            self._make_cold()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
            with torch.cuda.stream(stream):
                torch.cuda._sleep(_SLEEP_CYCLES)
            first.record(stream)
            wait = begin()
            last.record(stream)
            wait()
            self.wait()
            times.append(first.elapsed_time(last) / 1e3)
        return min(times[1:])

    def _make_cold(self) -> None:
        self._cached.add_(1)
        self.wait()


def spin(is_done: Callable[[], bool]) -> None:
    """Waits for a copy or a digest, without pauses."""
    while not is_done():
        pass


def row(what: str, tokens: int, layout: KVLayout, times: Times) -> dict[str, Any]:
    """Returns a line of the table."""
    num_bytes = tokens * layout.token_bytes
    milliseconds = {f"{name}_ms": round(getattr(times, name) * 1e3, 3) for name in Times.__slots__}
    return (
        {"what": what, "tokens": tokens}
        | milliseconds
        | {
            "copy_gb_per_s": round(num_bytes / times.copy / 1e9, 1),
            "device_gb_per_s": round(num_bytes / times.device / 1e9, 1),
            "share": round(times.digest / times.copy, 4),
            "added": round(times.both / times.copy - 1, 4),
            "of_link": round(times.digest * _LINK_BYTES_PER_S / num_bytes, 4),
        }
    )


if __name__ == "__main__":
    main()
