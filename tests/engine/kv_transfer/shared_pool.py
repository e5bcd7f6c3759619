"""A process that holds a page pool in shared memory until it is killed, and a pool of this process.

python -m tests.engine.kv_transfer.shared_pool    prints how the pool is mapped, as base64 of msgpack
"""

import base64
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import PIPE, Popen

import msgspec
import numpy as np

from mini_infer_engine.kv_transfer.layout import KVLayout, KVMemory
from mini_infer_engine.kv_transfer.protocol.wire import TransportAddress
from mini_infer_engine.kv_transfer.transports.mapped_transport import MappedTransport
from mini_infer_engine.kv_transfer.transports.shared_memory import HostMemory, SharedArray
from tests.engine.server.dry_server import ROOT, environment

LAYOUT = KVLayout(num_layers=2, halves=2, page_size=16, num_heads=4, head_bytes=4, dtype="int32")
NUM_PAGES = 8


class SharedPool:
    """Pages [pages, layers, halves, page_size, heads] int32 that other processes can map, and their transport."""

    def __init__(self, layout: KVLayout = LAYOUT, rank: int = 0) -> None:
        self.layout = layout
        shared = SharedArray(NUM_PAGES * layout.page_bytes)
        sizes = (NUM_PAGES, layout.num_layers, layout.halves, layout.page_size, layout.num_heads)
        self.pages = shared.bytes.view(np.int32).reshape(sizes)
        self.memory = KVMemory(
            address=shared.bytes.ctypes.data,
            num_pages=NUM_PAGES,
            device="cpu",
            device_index=0,
            layout=layout,
            file=shared.file,
        )
        self.transport = MappedTransport(HostMemory(self.memory), self.memory, rank)


@contextmanager
def pool_of_another_process() -> Iterator[tuple[Popen[str], TransportAddress]]:
    """Another process with a pool, page after page of its own number."""
    command = [sys.executable, "-m", "tests.engine.kv_transfer.shared_pool"]
    with Popen(command, cwd=ROOT, env=environment(), stdout=PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            reported = base64.b64decode(process.stdout.readline())
            yield process, msgspec.msgpack.decode(reported, type=TransportAddress)
        finally:
            process.kill()


def main() -> None:
    """See the module."""
    pool = SharedPool()
    for page in range(NUM_PAGES):
        pool.pages[page] = page
    print(base64.b64encode(msgspec.msgpack.encode(pool.transport.describe())).decode(), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
