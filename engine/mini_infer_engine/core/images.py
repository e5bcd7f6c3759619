"""Defines the images of a prompt for the scheduler: their places, positions and keys. No torch, no pixels are read.

A prompt has one placeholder token for each embedding that the vision encoder makes of an image.
"""

import math
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from mini_infer_contract.images import DIGEST_BYTES, image_key_ids
from mini_infer_engine.config.model.vision import VisionConfig
from mini_infer_engine.core.request import ImageInput


class RowImage(msgspec.Struct, frozen=True, gc=False):
    """An image of which a prompt chunk has some or all placeholder tokens."""

    key: bytes
    """Name of its embeddings in the encoder cache."""
    offset: int
    """Cache index of its first placeholder token."""
    num_tokens: int
    grid: tuple[int, int, int]
    """Embeddings in time, height and width; a single row if positions have one dimension."""
    position: int
    """Position of its first placeholder token in each of these dimensions."""
    block_end: int
    """End of the tokens that attend to each other in both directions, of which it is a part, if they do."""

    @property
    def end(self) -> int:
        """Cache index after its last placeholder token."""
        return self.offset + self.num_tokens


class EncoderWork(msgspec.Struct, gc=False):
    """The work of the vision encoder before a pass: first it drops embeddings, then it computes some."""

    dropped: list[bytes] = []
    """Keys of embeddings that no later pass reads."""
    images: list[tuple[bytes, ImageInput]] = []
    """Images to encode, each with the key of its embeddings."""


@dataclass(slots=True, frozen=True)
class PromptImages:
    """The images of one prompt."""

    inputs: tuple[ImageInput, ...] = ()
    rows: tuple[RowImage, ...] = ()
    position_offset: int = 0
    """Position of every token after the last image, less its index."""
    is_bidirectional: bool = False
    """True if the tokens of an image attend to each other in both directions, so that no chunk may end within one."""

    @classmethod
    def of(cls, inputs: Iterable[ImageInput], vision: VisionConfig) -> "PromptImages":
        """Computes the places and positions of a prompt's images, as transformers' `get_rope_index` does for M-RoPE."""
        images, rows, offset = tuple(inputs), list[RowImage](), 0
        for image in images:
            grid, advance = (1, 1, image.num_tokens), image.num_tokens
            if vision.has_grid_positions:
                frames, height, width = image.grid
                grid = (frames, height // vision.merge_size, width // vision.merge_size)
                advance = max(grid[1], grid[2])
            end = image.offset + image.num_tokens
            key = image.digest + image.num_tokens.to_bytes(4, "big")
            rows.append(RowImage(key, image.offset, image.num_tokens, grid, image.offset + offset, end))
            offset += advance - image.num_tokens
        for index in range(len(rows) - 2, -1, -1):
            if rows[index].end == rows[index + 1].offset:  # transformers' masks take neighbours for one image
                rows[index] = msgspec.structs.replace(rows[index], block_end=rows[index + 1].block_end)
        return cls(images, tuple(rows), offset, vision.is_bidirectional)

    def __bool__(self) -> bool:
        """Returns True if the prompt has images."""
        return bool(self.rows)

    def overlapping(self, start: int, end: int) -> list[int]:
        """Returns the indexes of the images that have tokens from `start` to `end`."""
        return [index for index, row in enumerate(self.rows) if row.offset < end and start < row.end]

    def offset_at(self, end: int) -> int:
        """Returns the position of the token at index `end`, less that index, if no image has the token."""
        later = next((row for row in self.rows if row.offset >= end), None)
        return self.position_offset if later is None else later.position - later.offset

    def uncut_end(self, start: int, end: int) -> int:
        """Returns the last index up to `end` at which a chunk from `start` may end, which may be `start`."""
        if not self.is_bidirectional:
            return end
        cut = next((row for row in self.rows if row.offset < end < row.block_end), None)
        if cut is None:
            return end
        begin = min(row.offset for row in self.rows if row.block_end == cut.block_end)
        return max(start, begin)

    def longest_block(self) -> int:
        """Returns the most tokens that a chunk cannot divide; 1 if there are none."""
        if not self.is_bidirectional:
            return 1
        return max((row.block_end - row.offset for row in self.rows), default=1)


NO_IMAGES = PromptImages()


def key_ids(token_ids: "array[int]", start: int, images: Items[ImageInput]) -> "array[int]":
    """Returns token ids with the placeholders of images replaced, for the keys of blocks.

    `token_ids` are those of the prompt from index `start` on, and are changed in place.
    """
    end = start + len(token_ids)
    for image in images:
        first, last = max(start, image.offset), min(end, image.offset + image.num_tokens)
        if first < last:
            words = image_key_ids(image.digest, last - image.offset)[first - image.offset :]
            token_ids[first - start : last - start] = array("I", words)
    return token_ids


def images_fault(token_ids: Items[int], images: Items[ImageInput], vision: VisionConfig) -> str | None:
    """Returns why the images of a prompt cannot be read, or None if they can."""
    for number, image in enumerate(images):
        end = image.offset + image.num_tokens
        if image.offset < 0 or image.num_tokens < 1 or end > len(token_ids):
            return f"image {number} has tokens {image.offset} to {end} of a prompt of {len(token_ids)}"
        if any(token != vision.image_token_id for token in token_ids[image.offset : end]):
            return f"image {number} has other tokens than placeholders ({vision.image_token_id})"
        if len(image.digest) != DIGEST_BYTES:
            return f"image {number} has a digest of {len(image.digest)} bytes, not {DIGEST_BYTES}"
        if (obstacle := image_obstacle(image, vision)) is not None:
            return f"image {number}: {obstacle}"
    for before, after in pairwise(images):
        if after.offset < before.offset + before.num_tokens:
            return "images overlap or are not in the order of the prompt"
    return None


def image_obstacle(image: ImageInput, vision: VisionConfig) -> str | None:
    """Returns why the encoder cannot read an image, or None if it can."""
    if vision.tokens_per_crop:
        crops = image.shape[0] if image.shape else 0
        shape: tuple[int, ...] = (crops, 3, vision.image_size, vision.image_size)
        num_tokens = crops * vision.tokens_per_crop
    else:
        frames, height, width = image.grid
        if min(image.grid) < 1 or height % vision.merge_size or width % vision.merge_size:
            return f"its grid is {list(image.grid)}, and height and width must be multiples of {vision.merge_size}"
        shape = (frames * height * width, vision.patch_width)
        num_tokens = shape[0] // vision.merge_size**2
    if image.shape != shape:
        return f"its values have the shape {list(image.shape)}, not {list(shape)}"
    if len(image.pixels) != 4 * math.prod(shape):
        return f"its values have {len(image.pixels)} bytes, not {4 * math.prod(shape)}"
    if image.num_tokens != num_tokens:
        return f"it has {image.num_tokens} placeholder tokens, and the encoder makes {num_tokens} embeddings"
    return None
