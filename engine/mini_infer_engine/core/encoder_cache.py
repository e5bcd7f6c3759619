"""Decides which images the vision encoder computes before a pass, and which embeddings the device retains. No torch."""

from collections import OrderedDict

from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.core.images import EncoderWork, PromptImages
from mini_infer_engine.core.sequence import Sequence


class EncoderCacheManager:
    """Embeddings of images on the device: the least recently used are dropped first, and none that a pass reads.

    Sizes are in embeddings. A pass encodes images up to a budget, or one image that exceeds it.
    """

    def __init__(self, capacity: int, budget: int) -> None:
        """Creates an empty cache of `capacity` embeddings, to which a pass adds `budget` or one image."""
        self.capacity, self._budget = capacity, budget
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._used = 0
        self._dropped: list[bytes] = []
        """Keys whose embeddings the device still has."""
        self.num_encoded = 0
        """Images encoded since the start."""

    @property
    def num_embeddings(self) -> int:
        """Embeddings that are cached."""
        return self._used

    def most_tokens(self, batch: Batch, sequence: Sequence, count: int) -> int:
        """Returns how many of the next `count` tokens a chunk may have, with the embeddings that this pass can have."""
        images, start = sequence.images, sequence.num_computed
        end = images.uncut_end(start, start + count)
        read = {image.key: image.num_tokens for row in batch.rows for image in row.images}
        encoded = 0 if batch.encoder is None else sum(image.num_tokens for _, image in batch.encoder.images)
        for index in images.overlapping(start, end):
            image = images.rows[index]
            if image.key in read:
                continue
            read[image.key] = image.num_tokens
            new = 0 if image.key in self._sizes else image.num_tokens
            is_over_budget = bool(new and encoded and encoded + new > self._budget)
            if is_over_budget or sum(read.values()) > self.capacity:
                return self._before(images, start, index)
            encoded += new
        return end - start

    @staticmethod
    def _before(images: PromptImages, start: int, index: int) -> int:
        end = max(start, images.rows[index].offset)
        return images.uncut_end(start, end) - start

    def take(self, batch: Batch, row: Row, images: PromptImages) -> None:
        """Gives a row of the pass its images, and has the pass encode those that are not cached."""
        start, end = row.start, row.start + row.count
        row.position_offset = images.offset_at(end)
        indexes = images.overlapping(start, end)
        if not indexes:
            return
        row.images = [images.rows[index] for index in indexes]
        reads = {image.key for other in batch.rows for image in other.images} | {image.key for image in row.images}
        for index, image in zip(indexes, row.images, strict=True):
            if image.key in self._sizes:
                self._sizes.move_to_end(image.key)
                continue
            self._make_room(image.num_tokens, reads)
            self._sizes[image.key] = image.num_tokens
            self._used += image.num_tokens
            self.num_encoded += 1
            if batch.encoder is None:
                batch.encoder = EncoderWork([], [])
            batch.encoder.images.append((image.key, images.inputs[index]))
        if batch.encoder is not None:
            batch.encoder.dropped += self._dropped
            self._dropped = []

    def _make_room(self, size: int, reads: set[bytes]) -> None:
        unread = [key for key in self._sizes if key not in reads]
        for key in unread:
            if self._used + size <= self.capacity:
                return
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        self._used -= self._sizes.pop(key)
        self._dropped.append(key)

    def reset(self) -> None:
        """Drops all embeddings, after a pass has failed that may have encoded some or not."""
        for key in list(self._sizes):
            self._drop(key)
