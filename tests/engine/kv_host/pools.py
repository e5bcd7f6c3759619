"""Shared pools and records for tests: pages whose bytes follow from their key."""

from pathlib import Path

import numpy as np

from mini_infer_contract.blocks import KEY_BYTES
from mini_infer_engine.core.kv_tiers.page_record import PageRecord
from mini_infer_engine.core.prefix_cache import Block
from mini_infer_engine.kv_host.open_pool import open_pool, record_bytes
from mini_infer_engine.kv_host.pool_file import PoolFile, PoolLayout
from mini_infer_engine.kv_host.shared_index import SharedHostIndex

PAGE_BYTES = 8192
IDENTITY = "a" * 64


def open_test_pool(folder: Path, num_slots: int = 8, identity: str = IDENTITY) -> PoolFile:
    """Returns a pool with exactly so many slots."""
    size = PoolLayout(num_slots, record_bytes(16), PAGE_BYTES, identity).file_bytes
    return open_pool(str(folder), size, PAGE_BYTES, 16, identity)


def open_index(folder: Path, num_slots: int = 8) -> SharedHostIndex:
    return SharedHostIndex(open_test_pool(folder, num_slots), record_events=True)


def record_of(number: int) -> PageRecord:
    """The record of a page of one block, whose digest is the sum of its bytes."""
    block = Block(0, number.to_bytes(KEY_BYTES, "big"), None, bytes(64), "", [])
    return PageRecord((block,), int(content_of(number).astype(np.uint64).sum()))


def content_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, PAGE_BYTES, np.uint8)


def page_of(index: SharedHostIndex, slot: int) -> np.ndarray:
    return np.frombuffer(index._file.pages, np.uint8, PAGE_BYTES, slot * PAGE_BYTES)


def store(index: SharedHostIndex, number: int) -> int | None:
    """Stores a page as an engine does. Returns its slot, or None if there was no room."""
    for slot in index.allocate(1):
        np.copyto(page_of(index, slot), content_of(number))
        index.add_all([(slot, record_of(number))])
        index.release_all([slot])
        return slot
    return None


def key_of(number: int) -> bytes:
    return record_of(number).key
