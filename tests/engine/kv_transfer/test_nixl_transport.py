"""NIXL in this process: what it costs while nothing moves."""

import contextlib
import time

import numpy as np
import pytest

from mini_infer_engine.kv_transfer.layout import KVLayout, KVMemory
from mini_infer_engine.kv_transfer.transport import TransportChoice
from mini_infer_engine.kv_transfer.transports.nixl_transport import NixlTransport, load_nixl

pytest.importorskip("nixl_cu13", reason="needs NIXL: pip install nixl-cu13")
LAYOUT = KVLayout(num_layers=2, halves=2, page_size=16, num_heads=2, head_bytes=4, dtype="int32")


def test_nixl_uses_no_cpu_when_nothing_is_in_flight() -> None:
    pool = np.zeros(LAYOUT.page_bytes, np.uint8)
    memory = KVMemory(address=pool.ctypes.data, num_pages=1, device="cpu", device_index=0, layout=LAYOUT)
    make = load_nixl().nixlBind.nixlAgent
    with contextlib.closing(NixlTransport(TransportChoice(), "idle", memory)):
        start_s, cpu_s = time.monotonic(), time.process_time()
        time.sleep(0.25)
        share = (time.process_time() - cpu_s) / (time.monotonic() - start_s)
    assert share < 0.2, "NIXL's progress thread polls without a pause"
    assert load_nixl().nixlBind.nixlAgent is make, "others' agents are as NIXL makes them"
