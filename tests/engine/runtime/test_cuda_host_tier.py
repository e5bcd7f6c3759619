"""Tests a GPU's tier without one: its streams run at once, and the driver copies in main memory."""

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from mini_infer_engine.core.kv_tiers.tier_memory import PageMove
from mini_infer_engine.runtime.memory import cuda_host_tier
from mini_infer_engine.runtime.memory.cuda_host_tier import CudaHostTier
from mini_infer_engine.runtime.memory.page_codec import RawPages
from tests.support.tier_copies import moved

NUM_PAGES, NUM_LAYERS, WIDTHS = 6, 14, (14 * 8, 10)


class _Event:
    def __init__(self, **_: bool) -> None:
        self.time_s = 0.0

    def record(self, _: object = None) -> None:
        self.time_s = time.perf_counter()

    def query(self) -> bool:
        assert self.time_s, "it was never recorded"
        return True

    def elapsed_time(self, end: "_Event") -> float:
        return 1000 * (end.time_s - self.time_s)

    def wait(self) -> None:
        assert self.time_s, "it was never recorded"


class _Stream:
    cuda_stream = 7

    def __init__(self, *_: object, **__: object) -> None:
        self.num_synchronised = 0

    def wait_stream(self, _: object) -> None:
        """Returns at once: all that was launched has run."""

    def synchronize(self) -> None:
        self.num_synchronised += 1


class _Driver:
    """Copies batches in main memory."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def call(self, function: str, *arguments: Any) -> None:
        assert function == "cuMemcpyBatchAsync"
        *lists, count, _, _, _, _, stream = arguments
        assert stream.value == _Stream.cuda_stream
        self.batches.append(count.value)
        for row in zip(*((ctypes.c_uint64 * count.value).from_address(one.value) for one in lists), strict=True):
            ctypes.memmove(*row)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> _Stream:
    """Stands in for CUDA. Returns the stream of the passes."""
    passes, empty = _Stream(), torch.empty

    @contextmanager
    def inside(_: object) -> Iterator[None]:
        yield

    for name, stand_in in {
        "Stream": _Stream,
        "Event": _Event,
        "stream": inside,
        "device": inside,
        "current_stream": lambda _: passes,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **options: empty(*sizes, **options))
    for name in ("_pin", "_unpin"):
        monkeypatch.setattr(cuda_host_tier, name, lambda *_: None)
    monkeypatch.setattr(cuda_host_tier, "CudaDriver", _Driver)
    return passes


def tier_of(*widths: int) -> tuple[CudaHostTier, list[torch.Tensor]]:
    parts = [torch.randint(-(2**62), 2**62, (NUM_PAGES, width)) for width in widths]
    return CudaHostTier(RawPages(parts), NUM_PAGES, b""), parts


def test_pages_of_several_parts_come_back_to_other_places_by_one_call_each_way(passes: _Stream) -> None:
    tier, parts = tier_of(*WIDTHS)
    before = [part.clone() for part in parts]
    tier.store(0, [PageMove(page, NUM_PAGES - 1 - page) for page in range(NUM_PAGES)])
    stored = moved(tier)
    for part in parts:
        part.zero_()
    tier.load(1, [PageMove(5, 2), PageMove(1, 3)])
    loaded = moved(tier)
    assert loaded.digests == [stored.digests[0], stored.digests[4]]
    for old, new in zip(before, parts, strict=True):
        assert torch.equal(new[[2, 3]], old[[0, 4]])
        assert not new[[0, 1, 4, 5]].any()
    assert tier._pieces._driver.batches == [2 * NUM_PAGES, 4]


@pytest.mark.parametrize("follows_passes", [False, True])
def test_load_by_layers_copies_groups_and_proves_what_it_has_brought(passes: _Stream, follows_passes: bool) -> None:
    tier, (pages,) = tier_of(WIDTHS[0])
    tier.num_layers, tier.follows_passes, before = NUM_LAYERS, follows_passes, pages.clone()
    tier.store(0, [PageMove(page, page) for page in range(NUM_PAGES)])
    stored = moved(tier)
    tier.words[1, 7] ^= np.uint64(4)
    pages.zero_()
    assert tier.layers_to_capture is tier._layers
    began_s = time.perf_counter()
    load = tier.load_layerwise(3, [PageMove(0, 4), PageMove(1, 5)])
    took_s = time.perf_counter() - began_s
    for layer in range(NUM_LAYERS):
        load.wait_for_layer(layer)
    assert torch.equal(pages[4], before[0])
    assert tier._pieces._driver.batches[1:] == [2] * len(tier._layers.groups)
    ended = moved(tier)
    assert (ended.ticket, ended.digests[0]) == (3, stored.digests[0])
    assert ended.digests[1] != stored.digests[1]
    assert ended.seconds <= took_s, "it counts the time until the host has looked at the load"
    assert passes.num_synchronised == follows_passes
