"""A runner whose logits are random, for tests of what sampling may choose. It has no model and reads no pages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mini_infer_engine.config.model.kv_groups import UNIFORM
from mini_infer_engine.core.batch import NO_SWAP, Batch, Row, TokenMasks
from mini_infer_engine.core.request import Request
from mini_infer_engine.core.result import PassResult


@dataclass(eq=False)
class Launched:
    rows: list[Row]
    tokens: list[Sequence[int]]


class RandomRunner:
    """`boosted`: tokens that are likelier than others, such as those that bring a text to its end."""

    kv_cache = UNIFORM
    swap_space = NO_SWAP
    eviction_obstacle = None
    host_memory = None
    max_speculative_rows = 0

    def __init__(self, vocab_size: int, boosted: Sequence[int], num_pages: int = 4000, page_size: int = 16) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._bias = np.zeros(vocab_size)
        self._bias[list(boosted)] = 7.0

    def refuses(self, request: Request) -> str | None:
        """Nothing."""

    def launch(self, batch: Batch) -> Launched:
        handle = Launched(batch.rows, [])
        if not batch.waits_for_masks:
            self.sample(handle, TokenMasks([], np.zeros((0, 0), dtype=np.uint32)))
        return handle

    def guesses(self, handle: Any) -> Mapping[int, Sequence[int]]:
        """None."""
        del handle
        return {}

    def sample(self, handle: Launched, masks: TokenMasks) -> None:
        by_row = dict(zip(masks.rows, masks.bits, strict=True))
        handle.tokens = [
            () if row.sampling is None else (self._choose(row, by_row.get(index)),)
            for index, row in enumerate(handle.rows)
        ]

    def _choose(self, row: Row, mask: np.ndarray | None) -> int:
        draw = np.random.default_rng((row.noise_seed, row.output_index))
        scores = self._bias + draw.gumbel(size=len(self._bias))
        if mask is not None:
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(scores)]
            scores = np.where(allowed, scores, -np.inf)
        return int(scores.argmax())

    def collect(self, handle: Launched) -> PassResult:
        return PassResult(handle.tokens)
