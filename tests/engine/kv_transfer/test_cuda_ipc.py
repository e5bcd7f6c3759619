"""What CUDA's driver is asked for, and what its refusals mean; the driver itself is in tests/gpu2."""

from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.kv_transfer.cuda_driver import CudaError
from mini_infer_engine.kv_transfer.layout import KVMemory
from mini_infer_engine.kv_transfer.transport import TransportError
from mini_infer_engine.kv_transfer.transports.cuda_ipc import CudaIpcMemory, open_pool, share_pool
from tests.engine.kv_transfer.shared_pool import LAYOUT, SharedPool

BASE, SIZE = 1 << 40, 64 << 20
MEMORY = KVMemory(address=BASE + 4096, num_pages=10, device="cuda", device_index=0, layout=LAYOUT)


@dataclass
class FakeDriver:
    """One allocation here, which the other process finds at another address."""

    has_handles: bool = True
    is_reached: bool = True
    there: int = 7 << 40
    size_there: int = SIZE
    closed: list[int] = field(default_factory=list)

    def range_of(self, address: int) -> tuple[int, int]:
        return (BASE, SIZE) if address < self.there else (self.there, self.size_there)

    def handle_of(self, address: int) -> bytes:
        assert address == BASE, "a handle is of a whole allocation"
        if not self.has_handles:
            raise CudaError("cuIpcGetMemHandle: CUDA_ERROR_INVALID_VALUE")
        return bytes(range(64))

    def open(self, handle: bytes) -> int:
        assert handle == bytes(range(64))
        if not self.is_reached:
            raise CudaError("cuIpcOpenMemHandle_v2: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
        return self.there

    def close(self, address: int) -> None:
        self.closed.append(address)


def test_cuda_ipc_maps_the_pool_at_its_offset_in_the_allocation() -> None:
    driver = FakeDriver()
    pool = share_pool(driver, MEMORY)
    assert (pool.offset, pool.size, pool.pool_bytes) == (4096, SIZE, 10 * LAYOUT.page_bytes)
    mapping = open_pool(driver, pool)
    assert mapping.address == driver.there + 4096
    mapping.close()
    assert driver.closed == [driver.there]


def test_cuda_ipc_is_refused_with_the_remedy_when_memory_has_no_handle() -> None:
    with pytest.raises(ModelError, match="expandable_segments"):
        share_pool(FakeDriver(has_handles=False), MEMORY)


def test_a_pool_is_refused_when_it_is_unreachable_or_not_as_described() -> None:
    pool = share_pool(FakeDriver(), MEMORY)
    with pytest.raises(TransportError, match="PEER_ACCESS_UNSUPPORTED"):
        open_pool(FakeDriver(is_reached=False), pool)
    with pytest.raises(TransportError, match="no handle"):
        open_pool(FakeDriver(), replace(pool, handle=b"short"))
    other = FakeDriver(size_there=SIZE // 2)
    with pytest.raises(TransportError, match="not the memory"):
        open_pool(other, pool)
    assert other.closed == [other.there]


def test_cuda_ipc_is_refused_when_the_pool_is_in_host_memory() -> None:
    with pytest.raises(ModelError, match="--kv-transport cuda-ipc"):
        CudaIpcMemory(SharedPool().memory)
