"""Kills writers of the disk's tier by SIGKILL: what the next process finds is whole, and what it reads was written.

    python benchmarks/kv_disk_kills.py --kills 300 --out FILE

Each writer opens the folder that the one before it has left, and writes pages of its own number without end, four at a
time, until it is killed after 5 to 60 ms. Another process then finds the pages that are there, as an engine that starts
does, and compares each byte with what a writer has written. Runs on a CPU.
"""

import mmap
import multiprocessing
import random
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from common.report import make_parser, print_table, save

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS, KEY_BYTES
from mini_infer_engine.core.kv_tiers.page_record import PageRecord
from mini_infer_engine.core.prefix_cache import Block
from mini_infer_engine.kv_disk.disk_folder import DiskFolder
from mini_infer_engine.kv_disk.disk_store import DiskStore

_AT_ONCE = 4


class Memory:
    """Pages of main memory, aligned as direct I/O needs it."""

    def __init__(self, page_bytes: int) -> None:
        """Maps a few pages."""
        self._page_bytes = page_bytes
        self._bytes = memoryview(mmap.mmap(-1, _AT_ONCE * page_bytes))

    def page(self, number: int) -> memoryview:
        """Returns the bytes of a page."""
        return self._bytes[number * self._page_bytes : (number + 1) * self._page_bytes]


def content(number: int, page_bytes: int) -> bytes:
    """Returns what a page with this number has."""
    return np.random.default_rng(number).bytes(page_bytes)


def open_store(folder: Path, memory: Memory, page_bytes: int) -> DiskStore:
    """Opens a folder as an engine does; it has room for a hundred pages."""
    return DiskStore(DiskFolder(folder, "model"), 100 * (page_bytes + 4096), page_bytes, BLOCK_SIZE_TOKENS, memory.page)


def write_without_end(begun: Connection, folder: Path, page_bytes: int, writer: int) -> None:
    """Writes pages until it is killed."""
    memory = Memory(page_bytes)
    store, number = open_store(folder, memory, page_bytes), writer << 32
    begun.send(True)
    while True:
        for place in range(_AT_ONCE):
            memory.page(place)[:] = content(number + place, page_bytes)
            block = Block(0, (number + place).to_bytes(KEY_BYTES, "big"), None, bytes(4 * BLOCK_SIZE_TOKENS), "", [])
            store.write(place, place, PageRecord((block,), number + place))
        ended = 0
        while ended < _AT_ONCE:
            store.wait(1.0)
            ended += len(store.take())
        number += _AT_ONCE


def check(found: Connection, folder: Path, page_bytes: int) -> None:
    """Sends the keys of all pages that a start finds, and those whose bytes are others."""
    memory, wrong = Memory(page_bytes), list[int]()
    store = open_store(folder, memory, page_bytes)
    store.join_recovery()
    pages = store.take_recovered()
    for page in pages:
        store.read(0, page.location, 0)
        ended = store.take()
        while not ended:
            store.wait(1.0)
            ended = store.take()
        number = int.from_bytes(page.record.key, "big")
        if ended[0].error or page.record.digest != number or bytes(memory.page(0)) != content(number, page_bytes):
            wrong.append(number)
    found.send(([int.from_bytes(page.record.key, "big") for page in pages], wrong))


def main() -> int:
    """Kills, prints a table, and writes a JSON file. Returns 1 if a page was wrong."""
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--page-bytes", type=int, default=256 << 10)
    parser.add_argument("--folder", help="where the tier's folder is made (default: that of temporary files)")
    args = parser.parse_args()
    if args.smoke:
        args.kills = 3
    context, draw, counts = multiprocessing.get_context("forkserver"), random.Random(1), Counter[str]()
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        for writer in range(args.kills):
            ours, theirs = context.Pipe()
            process = context.Process(target=write_without_end, args=(theirs, Path(name), args.page_bytes, writer))
            process.start()
            ours.recv()
            time.sleep(draw.uniform(0.005, 0.06))
            process.kill()
            process.join()
            checker = context.Process(target=check, args=(theirs, Path(name), args.page_bytes))
            checker.start()
            numbers, wrong = ours.recv()
            checker.join()
            counts["kills"] += process.exitcode == -9
            counts["pages found"] += len(numbers)
            counts["of the writer that was killed"] += sum(number >> 32 == writer for number in numbers)
            counts["wrong"] += len(wrong)
            ours.close(), theirs.close()
    row = dict(counts) | {"page bytes": args.page_bytes, "seconds": round(time.monotonic() - begin_s, 1)}
    save(args.out, {"rows": [row]})
    print_table(list(row), [list(row.values())])
    return int(counts["wrong"] > 0 or counts["kills"] < args.kills)


if __name__ == "__main__":
    raise SystemExit(main())
