"""A pool of another process, mapped by CUDA IPC: what is copied arrives, and a process that dies costs nothing.

KV_TEST_GPUS=0,0 puts both pools on one GPU.
"""

import base64
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import msgspec
import pytest

from mini_infer_engine.kv_transfer.layout import Span
from mini_infer_engine.kv_transfer.protocol.wire import TransportAddress
from mini_infer_engine.kv_transfer.transport import Motion, Transport, TransportChoice, TransportError
from tests.engine.server.dry_server import ROOT, environment, wait_until

torch = pytest.importorskip("torch")
GPUS = os.environ.get("KV_TEST_GPUS", "0,1").split(",")
pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.skipif(
        torch.cuda.device_count() < len(set(GPUS)), reason="needs two GPUs of one host: see KV_TEST_GPUS"
    ),
]
NUM_PAGES = 2000
"""Of the other process: 2 GB."""


class Holder:
    """The other process."""

    def __init__(self, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu2.pool_program", str(NUM_PAGES)],
            cwd=ROOT,
            env=environment() | {"CUDA_VISIBLE_DEVICES": GPUS[1]} | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.description = self._line()

    def _line(self) -> str:
        out: IO[str] | None = self.process.stdout
        assert out is not None
        return out.readline().strip()

    def sum(self, page: int) -> int:
        """Of a page's bytes."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"sum {page}\n")
        self.process.stdin.flush()
        return int(self._line())

    @property
    def address(self) -> TransportAddress:
        return msgspec.msgpack.decode(base64.b64decode(self.description), type=TransportAddress)


@contextmanager
def holder_process(**variables: str) -> Iterator[Holder]:
    holder = Holder(**variables)
    try:
        yield holder
    finally:
        holder.process.kill()
        holder.process.wait()


@contextmanager
def pool_here() -> Iterator[tuple[Transport, torch.Tensor]]:
    from mini_infer_engine.kv_transfer.transports.open_transport import open_transport
    from tests.gpu2.pool_program import LAYOUT, memory_of

    pages = torch.zeros((300, LAYOUT.page_bytes), dtype=torch.uint8, device=f"cuda:{GPUS[0]}")
    pages[:] = torch.arange(300, device=pages.device)[:, None] % 251 + 1
    torch.cuda.synchronize(pages.device)
    transport = open_transport(TransportChoice("cuda-ipc"), "driver", memory_of(pages))
    yield transport, pages
    transport.close()


def ended(motion: Motion) -> str:
    limit_s = time.monotonic() + 30
    while (progress := motion.progress()) == "busy":
        assert time.monotonic() < limit_s
        time.sleep(0.0001)
    return progress


def test_cuda_ipc_writes_and_reads_pages_in_place() -> None:
    from tests.gpu2.pool_program import LAYOUT

    with holder_process() as holder, pool_here() as (transport, pages):
        transport.add_peer("holder", LAYOUT, holder.address)
        assert ended(transport.start("holder", "write", Span([7, 2], [1999, 0], 0, 256))) == "done"
        assert ended(transport.start("holder", "write", Span([9], [5], 0, 128, (1, 2)))) == "done"
        expected = {1999: 8, 0: 3, 1: 1, 1998: 1998 % 256}
        assert {page: holder.sum(page) for page in expected} == {
            page: value * LAYOUT.page_bytes for page, value in expected.items()
        }
        assert holder.sum(5) == (3 * 5 + 10) * LAYOUT.layer_bytes
        assert ended(transport.start("holder", "read", Span([0, 1], [44, 45], 0, 200))) == "done"
        assert (pages[0] == 44).all()
        assert (pages[1] == 45).all()
        assert (pages[2] == 3).all()
        with pytest.raises(TransportError, match="of a pool of"):
            transport.start("holder", "write", Span([0], [NUM_PAGES], 0, 128))


def test_a_process_that_is_killed_meanwhile_loses_its_memory_and_nobody_elses() -> None:
    from tests.gpu2.pool_program import LAYOUT

    device = torch.device(f"cuda:{GPUS[1]}")
    with pool_here() as (transport, pages):
        before = torch.cuda.mem_get_info(device)[0]
        with holder_process() as holder:
            transport.add_peer("holder", LAYOUT, holder.address)
            span = Span(list(range(300)), list(range(300)), 0, 300 * 128)
            motions = [transport.start("holder", "write", span) for _ in range(100)]
            holder.process.kill()
            holder.process.wait()
            motions += [transport.start("holder", "write", span) for _ in range(20)]
            assert {ended(motion) for motion in motions} == {"done"}
            transport.tend()
            with pytest.raises(TransportError, match="not connected"):
                transport.start("holder", "write", span)
        wait_until(lambda: torch.cuda.mem_get_info(device)[0] > before - NUM_PAGES * LAYOUT.page_bytes // 2, 20)
        assert int(pages[5, 0]) == 6, "this GPU still computes"


def test_memory_that_has_no_handle_is_refused_with_the_remedy() -> None:
    with holder_process(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True") as holder:
        assert holder.description.startswith("refused: CUDA IPC cannot share the page pool")
        assert "expandable_segments" in holder.description
