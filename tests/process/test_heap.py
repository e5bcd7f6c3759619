import subprocess
import sys

import pytest

from mini_infer_process import heap
from mini_infer_process.heap import MIN_FREE_BYTES, TRIM_EVERY_S, HeapTrimmer


def test_the_heap_is_trimmed_once_a_minute_when_the_process_is_often_idle() -> None:
    trimmer = HeapTrimmer()
    times = [10.0, 11.0, 10.0 + TRIM_EVERY_S - 0.1, 10.0 + TRIM_EVERY_S, 11.0 + TRIM_EVERY_S]
    assert [trimmer.trim_if_due(now_s, is_idle=True) for now_s in times] == [True, False, False, True, False]


@pytest.mark.parametrize(("free", "trims"), [(0, False), (MIN_FREE_BYTES - 1, False), (MIN_FREE_BYTES, True)])
def test_a_busy_process_trims_its_heap_when_much_of_it_is_free(
    monkeypatch: pytest.MonkeyPatch, free: int, trims: bool
) -> None:
    monkeypatch.setattr(heap, "free_heap_bytes", lambda: free)
    assert HeapTrimmer().trim_if_due(0.0, is_idle=False) is trims


def test_free_bytes_of_the_heap_grow_when_blocks_between_others_are_freed() -> None:
    if not heap.free_heap_bytes():
        pytest.skip("this C library does not say how much is free")
    blocks = [bytearray(100_000) for _ in range(400)]
    before = heap.free_heap_bytes()
    del blocks[::2]
    assert heap.free_heap_bytes() - before > 15_000_000


GROWTH = """
from mini_infer_process.heap import map_large_blocks
import sys
if sys.argv[1] == "mapped":
    map_large_blocks()
def resident_mib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) >> 10
before = resident_mib()
body = b"x" * (28 << 20)
del body
body, kept = b"x" * (24 << 20), [b"y" * 1000 for _ in range(1000)]
del body
print(resident_mib() - before)
"""


@pytest.mark.skipif(not heap.free_heap_bytes(), reason="this C library does not say how much is free")
def test_memory_of_a_body_goes_back_to_the_kernel_when_large_blocks_are_mapped() -> None:
    grown = {
        how: int(subprocess.run([sys.executable, "-c", GROWTH, how], capture_output=True, check=True).stdout)
        for how in ("as usual", "mapped")
    }
    assert grown["as usual"] >= 20
    assert grown["mapped"] <= 6
