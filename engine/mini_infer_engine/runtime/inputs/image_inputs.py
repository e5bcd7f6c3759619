"""Lays the images of a pass out: which tokens have their embeddings, at which positions, and which keys they see.

The functions are pure, on arrays of the host; `PassImages` has the result on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mini_infer_engine.core.batch import Row
from mini_infer_engine.core.images import RowImage
from mini_infer_engine.models.causal_model import CausalModel
from mini_infer_engine.models.decoder import DecoderModel
from mini_infer_engine.models.vision.deepstack import DeepstackFeatures
from mini_infer_engine.ops.base import AttentionPass, Ops, ResidualState


@dataclass(frozen=True, slots=True)
class PassImages:
    """Images of one pass on the device."""

    embedded: tuple[Tensor, Tensor] | None
    """Placeholders' indexes in the pass [placeholders] int64, and their embeddings [placeholders, hidden]; None in a
    pipeline stage behind the first.
    """
    deepstack: DeepstackFeatures | None
    positions: Tensor | None  # [3, tokens] int64, in time, height and width; None if positions have one dimension
    last_keys: Tensor | None  # [tokens] int64, the last cache index that each token sees; None: its own

    def forward(self, model: CausalModel, ops: Ops, hidden: Tensor, attention: AttentionPass) -> ResidualState:
        """Runs the model over embedded tokens [tokens, hidden], those of images in place of their placeholders."""
        assert isinstance(model, DecoderModel), "other models have no vision encoder"
        model.deepstack = self.deepstack
        try:
            if self.embedded is not None:
                hidden = hidden.index_copy_(0, *self.embedded)
            state: ResidualState = model(ops, hidden, attention)
        finally:
            model.deepstack = None
        return state


def placeholder_tokens(rows: Sequence[Row]) -> tuple[np.ndarray, list[tuple[bytes, int, int]]]:
    """Returns the indexes in the pass of all placeholder tokens, and the parts of images that they stand for.

    A part is the key of an image's embeddings with the first of them and the one after the last.
    """
    tokens: list[np.ndarray] = []
    parts: list[tuple[bytes, int, int]] = []
    begin = 0
    for row in rows:
        for image in row.images:
            first, last = max(row.start, image.offset), min(row.start + row.count, image.end)
            tokens.append(np.arange(first, last) + (begin - row.start))
            parts.append((image.key, first - image.offset, last - image.offset))
        begin += row.count
    return np.concatenate(tokens), parts


def grid_positions(rows: Sequence[Row]) -> np.ndarray:
    """Returns the position of each token of a pass in time, height and width, [3, tokens] int64.

    As transformers' `get_rope_index`, it gives a text token one number in all three, and goes on after an image with
    the largest number in it.
    """
    return np.concatenate(
        [row_positions(row.start, row.count, row.images, row.position_offset) for row in rows], axis=1
    )


def row_positions(start: int, count: int, images: Sequence[RowImage], offset: int) -> np.ndarray:
    """Returns the positions [3, count] of the tokens from cache index `start` on.

    `offset` is the position less the cache index of tokens after the last of `images`.
    """
    end = start + count
    positions = np.tile(np.arange(start, end, dtype=np.int64) + offset, (3, 1))
    for image in reversed(images):  # tokens before an image: those between images are overwritten in turn
        before = slice(0, max(0, image.offset - start))
        positions[:, before] = np.arange(start, start + (before.stop or 0)) + (image.position - image.offset)
        first, last = max(start, image.offset), min(end, image.end)
        _, height, width = image.grid
        places = np.arange(first, last) - image.offset
        grid = np.stack((places // (height * width), places // width % height, places % width))
        positions[:, first - start : last - start] = grid + image.position
    return positions


def last_visible_keys(rows: Sequence[Row]) -> np.ndarray:
    """Returns the last cache index that each token of a pass sees, [tokens] int64: its own, or the end of its image."""
    found: list[np.ndarray] = []
    for row in rows:
        last = np.arange(row.start, row.start + row.count, dtype=np.int64)
        for image in row.images:
            last[max(0, image.offset - row.start) : image.end - row.start] = image.block_end - 1
        found.append(last)
    return np.concatenate(found)
