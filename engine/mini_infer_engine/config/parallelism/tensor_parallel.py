"""Computes which part of each weight a rank has, after Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053). No torch
here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_VOCABULARY_STEP = 64
"""Divisor of the rows of the vocabulary on a rank, which matrix products like; the last rows may be padding."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Some of the rows, or of the columns, of a checkpoint's tensor: these ranges, one after the other."""

    total: int
    """Rows or columns in the checkpoint."""
    ranges: tuple[tuple[int, int], ...]
    """The ranges, (begin, end) each."""

    @property
    def count(self) -> int:
        """The number of rows or columns in the shard."""
        return sum(end - begin for begin, end in self.ranges)


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """One rank's place in its group; models are built with it, through their config."""

    rank: int = 0
    size: int = 1
    whole_experts: bool = False
    """True if each rank has some experts of a mixture whole (expert parallelism), instead of a share of each one's
    width.
    """

    def even(self, total: int) -> Shard:
        """Returns an equal share. `total` is a multiple of the size."""
        share = total // self.size
        return Shard(total, ((self.rank * share, (self.rank + 1) * share),))

    def heads(self, num_heads: int, head_dim: int) -> Shard:
        """Returns the rows of a rank's heads: an equal share, or one head that several ranks have if there are fewer
        heads.
        """
        share = self.num_heads(num_heads)
        first = self.rank * num_heads // self.size
        return Shard(num_heads * head_dim, ((first * head_dim, (first + share) * head_dim),))

    def num_heads(self, num_heads: int) -> int:
        """Returns the number of a rank's heads."""
        return max(1, num_heads // self.size)

    def copies(self, num_heads: int) -> int:
        """Returns the number of ranks that have the same head."""
        return max(1, self.size // num_heads)

    def vocabulary(self, vocab_size: int) -> Shard:
        """Returns the tokens of a rank: as many as `vocabulary_rows`, or fewer for the last ranks."""
        rows = self.vocabulary_rows(vocab_size)
        return Shard(vocab_size, ((min(vocab_size, self.rank * rows), min(vocab_size, (self.rank + 1) * rows)),))

    def vocabulary_rows(self, vocab_size: int) -> int:
        """Returns the rows of the embeddings and of the head on each rank, padding included."""
        if self.size == 1:
            return vocab_size
        return -(-vocab_size // (self.size * _VOCABULARY_STEP)) * _VOCABULARY_STEP

    def obstacle(self, name: str, value: int, *, copies: bool = False) -> str | None:
        """Says why so many cannot be shared out; None if they can. `copies`: several ranks may have the same one."""
        if value % self.size == 0 or (copies and self.size % value == 0):
            return None
        return f"{name} = {value} cannot be split among {self.size} ranks: choose another --tensor-parallel-size"


def side_by_side(shards: Sequence[Shard]) -> Shard:
    """Returns the shard of several tensors that a checkpoint has as one."""
    ranges: list[tuple[int, int]] = []
    total = 0
    for shard in shards:
        ranges += [(total + begin, total + end) for begin, end in shard.ranges]
        total += shard.total
    return Shard(total, tuple(ranges))


ALONE = TensorParallel()
