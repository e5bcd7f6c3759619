"""Ranks of a tensor-parallel group as threads of one process: what they compute is tested without any sockets."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeVar

import torch
from torch import Tensor

from mini_infer_engine.config.settings import EngineSettings
from mini_infer_engine.distributed.collectives import Collectives, WithoutPeerMemory
from mini_infer_engine.distributed.tensor_parallel import TensorParallel
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.runtime.model_runner import ModelRunner, make_runner
from mini_infer_engine.runtime.torch_executor import TorchExecutor

Result = TypeVar("Result")


class _Table:
    """Where each rank leaves something for the others."""

    def __init__(self, size: int) -> None:
        self.barrier = Barrier(size, timeout=60)
        self.values: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Everybody's value, by rank."""
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


class ThreadRank(WithoutPeerMemory):
    """See `collectives.Collectives` and `rank_group.RankGroup`."""

    kind = "threads"

    def __init__(self, rank: int, table: _Table) -> None:
        self.parallel = TensorParallel(rank, len(table.values))
        self.collectives: Collectives = self
        self._table = table

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collectives.all_reduce`."""
        return torch.stack(self._table.exchange(self.parallel.rank, x.clone())).sum(0)

    def gather_columns(self, x: Tensor, width: int, out: Tensor | None = None) -> Tensor:
        """See `Collectives.gather_columns`."""
        gathered = torch.cat(self._table.exchange(self.parallel.rank, x.clone()), dim=1)[:, :width]
        return gathered if out is None else out.copy_(gathered)

    def begin_together(self) -> None:
        """See `RankGroup.begin_together`."""
        self._table.barrier.wait()

    def smallest(self, number: int) -> int:
        """See `RankGroup.smallest`."""
        return min(self._table.exchange(self.parallel.rank, number))

    def share_of(self, total: int) -> int:
        """See `RankGroup.share_of`."""
        return total // self.parallel.size


class ThreadGroup:
    """Runners of all ranks, and what is done by all of them at once."""

    def __init__(self, directory: Path, size: int, **settings: Any) -> None:
        self._size, self._table = size, _Table(size)
        self._threads = ThreadPoolExecutor(size)
        defaults = {"device": "cpu", "kv_cache_memory": 16_000_000, "max_num_seqs": 16}
        engine_settings = EngineSettings(model=str(directory), **(defaults | settings))
        config = read_config(directory)

        def make(rank: int) -> ModelRunner:
            return make_runner(engine_settings, config, directory, TorchExecutor, ThreadRank(rank, self._table))

        self.runners = self._all(make)

    def run(self, work: Callable[[ModelRunner], Result]) -> list[Result]:
        """What each rank makes of it."""
        return self._all(lambda rank: work(self.runners[rank]))

    def _all(self, work: Callable[[int], Result]) -> list[Result]:
        def guarded(rank: int) -> Result:
            try:
                return work(rank)
            except BaseException:
                self._table.barrier.abort()
                raise

        futures = [self._threads.submit(guarded, rank) for rank in range(self._size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]
