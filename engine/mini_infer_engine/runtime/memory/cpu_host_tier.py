"""Implements `HostMemory` below a pool in main memory: a thread for each direction copies beside the passes."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Condition, Thread

import numpy as np
import torch

from mini_infer_engine.core.kv_tiers.tier_memory import LayerwiseLoad, Moved, PageMove, StateMove
from mini_infer_engine.kv_transfer.token_digests import MODULUS
from mini_infer_engine.runtime.memory.host_tier import HostTier
from mini_infer_engine.runtime.memory.layerwise_load import CopiedLayers, copy_layers
from mini_infer_engine.runtime.memory.page_codec import PageCodec
from mini_infer_engine.runtime.memory.page_digests import PageDigests

_LEAST_FOLLOWED_S = 0.002
"""Seconds of a load of which less is saved than the threads of load and pass cost each other: with 1.2 ms a hit came
2 % later, with 3 ms 5 % sooner (benchmarks/results/2026-11-29-kv-loads-by-layer.md).
"""


class CpuHostTier(HostTier):
    """A tier below a pool in main memory."""

    latency_s = 0.0005
    bytes_per_s = 2e9  # a first estimate: a core that copies and hashes
    least_load_s = _LEAST_FOLLOWED_S

    def _open(self, codec: PageCodec) -> None:
        self._flat = self.words.reshape(-1)
        self._storing, self._loading = _Direction(codec), _Direction(codec.for_another_stream())
        self._ended: deque[Moved] = deque()
        self._num_under_way = 0
        self._changed = Condition()

    def store(self, ticket: int, moves: Sequence[PageMove], states: Sequence[StateMove] = ()) -> None:
        """Copies pages and states of the device to main memory."""
        self._request(self._storing, ticket, lambda: [*map(self._store, moves), *map(self._store_state, states)])

    def load(self, ticket: int, moves: Sequence[PageMove], states: Sequence[StateMove] = ()) -> None:
        """Copies pages and states of main memory to the device."""
        self._request(self._loading, ticket, lambda: [*map(self._load, moves), *map(self._load_state, states)])

    def load_layerwise(self, ticket: int, moves: Sequence[PageMove]) -> LayerwiseLoad:
        """Copies pages of main memory to the device, the first layer of all pages first."""
        layers, (part,) = CopiedLayers(self.places), self._loading.parts

        def copy() -> list[int]:
            try:
                copy_layers(self.words, part, moves, self.num_layers, layers)
            finally:
                layers.end()
            return self._loading.digests_of([move.target for move in moves])

        self._request(self._loading, ticket, copy)
        return layers

    def _store(self, move: PageMove) -> int:
        way = self._storing
        (row,) = rows = way.codec.rows_of([move.source])
        way.codec.encode([move.source], rows)
        (digest,) = way.digests_of(rows)
        for part, columns in zip(way.parts, self.columns, strict=True):
            np.copyto(self.words[move.target, columns], part[row])
        return digest

    def _load(self, move: PageMove) -> int:
        way = self._loading
        (row,) = rows = way.codec.rows_of([move.target])
        for part, columns in zip(way.parts, self.columns, strict=True):
            np.copyto(part[row], self.words[move.source, columns])
        (digest,) = way.digests_of(rows)
        way.codec.decode([move.target], rows)
        return digest

    def _store_state(self, state: StateMove) -> int:
        digest = self._digest_of_state(state)
        for piece, words in self._pieces_of(state):
            np.copyto(self._flat[words], piece.numpy().view(np.uint64))
        return digest

    def _load_state(self, state: StateMove) -> int:
        for piece, words in self._pieces_of(state):
            np.copyto(piece.numpy().view(np.uint64), self._flat[words])
        return self._digest_of_state(state)

    def _digest_of_state(self, state: StateMove) -> int:
        assert self._state_digests is not None, "this model has no recurrent state"
        return int(self._state_digests.of([state.checkpoint])) % MODULUS

    def _request(self, way: "_Direction", ticket: int, copy: Callable[[], list[int]]) -> None:
        begin_s = time.perf_counter()

        def run() -> None:
            try:
                with torch.inference_mode():
                    digests, error = copy(), ""
            except Exception as fault:  # it must reach the engine, which turns the tier off
                digests, error = [], f"{type(fault).__name__}: {fault}"
            moved = Moved(ticket, time.perf_counter() - begin_s, digests, error)
            with self._changed:
                self._ended.append(moved)
                self._num_under_way -= 1
                self._changed.notify_all()

        with self._changed:
            self._num_under_way += 1
        way.requests.put(run)

    def take(self) -> list[Moved]:
        """Returns the copies that have ended since the last call, without waiting."""
        with self._changed:
            ended = list(self._ended)
            self._ended.clear()
        return ended

    def wait(self, timeout_s: float) -> None:
        """Waits until a copy has ended, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._num_under_way, timeout_s)


class _Direction:
    """A thread that copies one way, with a codec of its own."""

    def __init__(self, codec: PageCodec) -> None:
        self.codec = codec
        self.parts = [part.numpy().view(np.uint64) for part in codec.parts]
        self.requests: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._digests = PageDigests(codec.parts)
        Thread(target=self._run, name="kv-host-tier", daemon=True).start()

    def digests_of(self, rows: Sequence[int]) -> list[int]:
        """Returns the digests of these rows."""
        return [digest % MODULUS for digest in self._digests.of(rows).tolist()]

    def _run(self) -> None:
        while True:
            self.requests.get()()
