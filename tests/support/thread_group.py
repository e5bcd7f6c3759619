"""Ranks of a group as threads of one process: what they compute is tested without any sockets."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Barrier, BrokenBarrierError, Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from mini_infer_engine.communication.collectives import Collectives, WithoutPeerMemory
from mini_infer_engine.communication.rank_group import AloneInGroup
from mini_infer_engine.communication.stage_link import NO_LINK, StageLink
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.config.parallelism.tensor_parallel import TensorParallel
from mini_infer_engine.core.batch import Batch, TokenMasks
from mini_infer_engine.core.request import Request
from mini_infer_engine.core.result import PassResult
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.runtime.cpu.executor import TorchExecutor
from mini_infer_engine.runtime.executor import PassHandle
from mini_infer_engine.runtime.model_runner import ModelRunner, make_runner
from mini_infer_engine.weight_transfer.exchange import NO_EXCHANGE, WeightExchange

Result = TypeVar("Result")


class Table:
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


class TableInTurns(Table):
    """Ranks hold `turn` while they compute: for what threads of one process cannot do at the same time."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.turn = Lock()

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """See `Table.exchange`; others have their turn meanwhile."""
        self.turn.release()
        try:
            return super().exchange(rank, value)
        finally:
            self.turn.acquire()


class ThreadRank(WithoutPeerMemory):
    """See `collectives.Collectives` and `rank_group.RankGroup`."""

    kind = "threads"

    def __init__(self, rank: int, table: Table, everybody: Table, link: StageLink = NO_LINK) -> None:
        """`rank`: in its stage, which exchanges by `table`."""
        self.parallel = TensorParallel(rank, len(table.values))
        self.collectives: Collectives = self
        self.link = link
        self.table, self._everybody = table, everybody
        self._number = link.index * len(table.values) + rank

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collectives.all_reduce`."""
        return torch.stack(self.table.exchange(self.parallel.rank, x.clone())).sum(0)

    def gather_columns(self, x: Tensor, width: int, out: Tensor | None = None) -> Tensor:
        """See `Collectives.gather_columns`."""
        gathered = torch.cat(self.table.exchange(self.parallel.rank, x.clone()), dim=1)[:, :width]
        return gathered if out is None else out.copy_(gathered)

    def begin_together(self) -> None:
        """See `RankGroup.begin_together`."""
        self._everybody.exchange(self._number, None)

    def smallest(self, number: int) -> int:
        """See `RankGroup.smallest`."""
        return min(self._everybody.exchange(self._number, number))

    def share_of(self, total: int) -> int:
        """See `RankGroup.share_of`."""
        return total // len(self._everybody.values)


class ThreadLink:
    """See `stage_link.StageLink`; the stages' links share their queues."""

    def __init__(self, index: int, hidden: "list[SimpleQueue[Tensor]]", tokens: "SimpleQueue[Tensor]") -> None:
        """`hidden`: to each stage."""
        self.index, self.size = index, len(hidden)
        self._hidden, self._tokens = hidden, tokens
        self.num_sent = self.num_tokens_received = 0
        self.is_open = False

    def open(self) -> None:
        """See `StageLink.open`."""
        self.is_open = True

    def send_hidden(self, hidden: Tensor) -> None:
        """See `StageLink.send_hidden`."""
        assert self.is_open
        assert hidden.is_contiguous()
        self.num_sent += 1
        self._hidden[self.index + 1].put(hidden)

    def receive_hidden(self, out: Tensor) -> Tensor:
        """See `StageLink.receive_hidden`."""
        hidden = self._hidden[self.index].get(timeout=60)
        assert hidden.shape == out.shape
        return out.copy_(hidden)

    def send_tokens(self, tokens: Tensor) -> None:
        """See `StageLink.send_tokens`."""
        self._tokens.put(tokens)

    def receive_tokens(self, out: Tensor) -> Tensor:
        """See `StageLink.receive_tokens`."""
        self.num_tokens_received += 1
        return out.copy_(self._tokens.get(timeout=60))


def thread_links(num_stages: int) -> list[ThreadLink]:
    """One for each stage."""
    hidden: list[SimpleQueue[Tensor]] = [SimpleQueue() for _ in range(num_stages)]
    tokens: SimpleQueue[Tensor] = SimpleQueue()
    return [ThreadLink(index, hidden, tokens) for index in range(num_stages)]


class StageAlone(AloneInGroup):
    """A stage whose runner is made without waiting for the others."""

    def __init__(self, link: StageLink) -> None:
        self.link = link


class StagesInTurn:
    """See `batch.Runner`: the runners of all stages, each pass of which goes through one after the other at once."""

    def __init__(self, runners: list[ModelRunner]) -> None:
        self.runners = runners
        first = runners[0]
        self.page_size, self.num_pages = first.page_size, min(one.num_pages for one in runners)
        self.kv_cache, self.swap_space, self.max_speculative_rows = first.kv_cache, first.swap_space, 0
        self.eviction_obstacle, self.host_memory = first.eviction_obstacle, first.host_memory
        self.max_model_len = first.max_model_len

    def refuses(self, request: Request) -> str | None:
        """See `Runner.refuses`."""
        return self.runners[-1].refuses(request)

    def launch(self, batch: Batch) -> list[PassHandle]:
        """See `Runner.launch`."""
        return [one.launch(batch) for one in self.runners]

    def sample(self, handle: list[PassHandle], masks: TokenMasks) -> None:
        """See `Runner.sample`."""
        for one, its_handle in zip(self.runners, handle, strict=True):
            one.sample(its_handle, masks)

    def collect(self, handle: list[PassHandle]) -> PassResult:
        """See `Runner.collect`."""
        return self.runners[-1].collect(handle[-1])


class ThreadGroup:
    """Runners of all ranks, and what is done by all of them at once."""

    def __init__(
        self,
        directory: Path,
        size: int,
        num_stages: int = 1,
        weights: WeightExchange = NO_EXCHANGE,
        **settings: Any,
    ) -> None:
        """`size`: ranks of each stage."""
        self._size, self._table = size * num_stages, Table(size * num_stages)
        self._tables = [Table(size) for _ in range(num_stages)] if num_stages > 1 else [self._table]
        self._threads = ThreadPoolExecutor(self._size)
        links = [thread_links(num_stages) for _ in range(size)]
        defaults = {"device": "cpu", "kv_cache_memory": 16_000_000, "max_num_seqs": 16}
        defaults |= {"disable_hybrid_kv_cache_manager": True}  # rows that tests write have one page table
        engine_settings = EngineSettings(model=str(directory), **(defaults | settings))
        config = read_config(directory, engine_settings.model_impl, reads_images=True)

        def make(rank: int) -> ModelRunner:
            stage, place = divmod(rank, size)
            link = links[place][stage] if num_stages > 1 else NO_LINK
            group = ThreadRank(place, self._tables[stage], self._table, link)
            return make_runner(engine_settings, config, directory, TorchExecutor, group, weights=weights)

        self.runners = self._all(make)

    def run(self, work: Callable[[ModelRunner], Result]) -> list[Result]:
        """What each rank makes of it."""
        return self._all(lambda rank: work(self.runners[rank]))

    def _all(self, work: Callable[[int], Result]) -> list[Result]:
        def guarded(rank: int) -> Result:
            try:
                return work(rank)
            except BaseException:
                for table in (self._table, *self._tables):
                    table.barrier.abort()
                raise

        futures = [self._threads.submit(guarded, rank) for rank in range(self._size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]


class RanksTogether:
    """A `batch.Runner` whose passes all ranks of a group compute at once; the first rank's results are its own."""

    def __init__(self, group: ThreadGroup) -> None:
        self._group, first = group, group.runners[0]
        self.page_size, self.num_pages, self.kv_cache = first.page_size, first.num_pages, first.kv_cache
        self.swap_space, self.max_speculative_rows = first.swap_space, 0
        self.eviction_obstacle = first.eviction_obstacle
        self.max_model_len, self.host_memory = first.max_model_len, first.host_memory

    def refuses(self, request: Request) -> str | None:
        """Returns the first rank's reason."""
        return self._group.runners[0].refuses(request)

    def launch(self, batch: Batch) -> dict[ModelRunner, PassHandle]:
        """Launches the pass on all ranks."""
        return dict(self._group.run(lambda rank: (rank, rank.launch(batch))))

    def sample(self, handle: dict[ModelRunner, PassHandle], masks: TokenMasks) -> None:
        """Samples on all ranks."""
        self._group.run(lambda rank: rank.sample(handle[rank], masks))

    def collect(self, handle: dict[ModelRunner, PassHandle]) -> PassResult:
        """Returns the first rank's result."""
        return self._group.run(lambda rank: rank.collect(handle[rank]))[0]
