"""Represents a rank in its group while it loads: all ranks reach the same points, and agree on numbers there."""

import logging
from collections.abc import Callable

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # torch's

from mini_infer_engine.communication.collectives import Collectives
from mini_infer_engine.communication.stage_link import StageLink
from mini_infer_engine.config.options.settings import EngineSettings, num_ranks, ranks_per_node
from mini_infer_engine.config.parallelism.tensor_parallel import TensorParallel
from mini_infer_engine.distributed.process_group import LateGroup

logger = logging.getLogger(__name__)


class GroupMember:
    """Implements `rank_group.RankGroup` for one rank of several."""

    def __init__(
        self,
        rank: int,
        store: Store,
        host: str,
        device: torch.device,
        settings: EngineSettings,
        agree: Callable[[int], list[int]],
    ) -> None:
        """Creates the rank's place in the group. `agree` exchanges one number of this rank for those of all ranks."""
        stage, tensor_rank = divmod(rank, settings.tensor_parallel_size)
        self.late = LateGroup(
            TensorParallel(tensor_rank, settings.tensor_parallel_size), stage, settings.pipeline_parallel_size
        )
        self.collectives: Collectives = self.late
        self.link: StageLink = self.late.link
        self.rank, self.size = rank, num_ranks(settings)
        self._num_texts = 0
        self._store, self._host, self._device, self._settings = store, host, device, settings
        self._agree = agree

    def begin_together(self) -> None:
        """Waits until all ranks have their weights, and then forms the process group."""
        logger.info("rank %d of %d has its weights", self.rank, self.size)
        self._agree(0)
        self.late.connect(self._store, self._host, self._device, self._settings)

    def smallest(self, number: int) -> int:
        """Returns the smallest number of all ranks."""
        return min(self._agree(number))

    def of_first(self, text: str) -> str:
        """Returns the first rank's text."""
        key = f"text-{self._num_texts}"
        self._num_texts += 1
        if not self.rank:
            self._store.set(key, text)
        return bytes(self._store.get(key)).decode()

    def share_of(self, total: int) -> int:
        """Divides the total by the number of ranks per node."""
        return total // ranks_per_node(self._settings)


def rank_device(settings_device: str, local_rank: int) -> torch.device:
    """Returns the device of a rank: the GPU of this index among those that the process sees, or the CPU.

    Raises ValueError if there are fewer GPUs than ranks.
    """
    if settings_device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"rank {local_rank} of this machine has no GPU: {torch.cuda.device_count()} are visible "
            "(CUDA_VISIBLE_DEVICES); choose a smaller --tensor-parallel-size or --pipeline-parallel-size"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
