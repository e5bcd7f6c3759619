"""Measures digests beside the copies that they prove: transfers by CUDA IPC, and swapping to pinned memory.

    python benchmarks/kv_digests.py --model qwen2.5-7b --out FILE

A digest is timed alone and beside a copy of the same tokens: the kernel that moves pages from pool to pool on one GPU,
and copies between the GPU and pinned memory. `share` is the digest's time over that of the copy. Without a GPU both are
in main memory.
"""

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common.report import integers, make_parser, print_table, save

from mini_infer_engine.kv_transfer.layout import KVLayout, KVMemory, Span
from mini_infer_engine.kv_transfer.pool_digests import PoolDigests
from mini_infer_engine.kv_transfer.transports.cuda_ipc import CudaIpcMemory
from mini_infer_engine.kv_transfer.transports.shared_memory import HostMemory, SharedArray
from mini_infer_engine.runtime.memory.page_digests import PageDigests

SHAPES = {
    "qwen2.5-7b": KVLayout(num_layers=28, halves=2, page_size=128, num_heads=4, head_bytes=256, dtype="bfloat16"),
    "8b": KVLayout(num_layers=32, halves=2, page_size=128, num_heads=8, head_bytes=256, dtype="bfloat16"),
}
_REPEATS = 7


def main() -> None:
    """Measures, prints a table, and writes a JSON file."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--lengths", default="512,2048,4096,16384", help="tokens")
    args = parser.parse_args()
    lengths = [256] if args.smoke else integers(args.lengths)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.smoke else "cpu")
    rows = [row for length in lengths for row in measure(SHAPES[args.model], length, device)]
    save(args.out, {"model": args.model, "device": str(device), "rows": rows})
    print_table(list(rows[0]), [list(row.values()) for row in rows])


def measure(layout: KVLayout, tokens: int, device: torch.device) -> list[dict[str, Any]]:
    """Returns the times of one length."""
    num_pages, on_gpu = -(-tokens // layout.page_size), device.type == "cuda"
    shared = SharedArray(2 * num_pages * layout.page_bytes)
    pool = torch.from_numpy(shared.bytes).to(device).view(2 * num_pages, layout.page_bytes)
    pool.random_(0, 256)
    memory = KVMemory(
        address=pool.data_ptr(),
        num_pages=2 * num_pages,
        device="cuda" if on_gpu else "cpu",
        device_index=0,
        layout=layout,
        file=None if on_gpu else shared.file,
    )
    order = random.Random(1).sample(range(num_pages), num_pages)
    digests, span = PoolDigests(memory), Span(order, [], 0, tokens)

    def digest() -> None:
        made = digests.begin(span, None)
        wait(lambda: made.progress() == "done")

    mapped = CudaIpcMemory(memory) if on_gpu else HostMemory(memory)
    pieces = np.array([[page, num_pages + place] for place, page in enumerate(order)]) * layout.page_bytes
    transfer_s = best(lambda: wait(mapped.copy(pieces + memory.address, layout.page_bytes)))
    rows = [row("transfer", tokens, layout, transfer_s, best(digest))]
    host = torch.empty((num_pages, layout.page_bytes), dtype=torch.uint8, pin_memory=on_gpu)
    swap = PageDigests([pool.view(torch.int64)])
    swap_s = best(lambda: swap.of(order))
    for way in ("out", "in"):

        def copy(way: str = way) -> None:
            for place, page in enumerate(order):
                source, target = (pool[page], host[place]) if way == "out" else (host[place], pool[page])
                target.copy_(source, non_blocking=True)

        rows.append(row(f"swap {way}", tokens, layout, best(copy), swap_s))
    return rows


def row(what: str, tokens: int, layout: KVLayout, copy_s: float, digest_s: float) -> dict[str, Any]:
    """Returns a line of the table."""
    num_bytes = tokens * layout.token_bytes
    return {
        "what": what,
        "tokens": tokens,
        "copy_ms": round(copy_s * 1e3, 3),
        "copy_gb_per_s": round(num_bytes / copy_s / 1e9, 1),
        "digest_ms": round(digest_s * 1e3, 3),
        "digest_gb_per_s": round(num_bytes / digest_s / 1e9, 1),
        "share": round(digest_s / copy_s, 4),
    }


def wait(is_done: Callable[[], bool]) -> None:
    """Waits for a copy or a digest, as the transfer thread does."""
    while not is_done():
        time.sleep(0.00001)


def best(run: Callable[[], Any]) -> float:
    """Returns the fewest seconds of several runs, until the device has ended."""
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        run()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


if __name__ == "__main__":
    main()
