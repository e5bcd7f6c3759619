"""Runs the vision encoder before passes and keeps its outputs on the device. The scheduler decides what and when."""

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.config.model.vision import VisionConfig
from mini_infer_engine.core.batch import Batch
from mini_infer_engine.core.images import EncoderWork
from mini_infer_engine.core.request import ImageInput
from mini_infer_engine.device import to_device
from mini_infer_engine.models.vision.deepstack import DeepstackFeatures
from mini_infer_engine.runtime.inputs.image_inputs import (
    PassImages,
    grid_positions,
    last_visible_keys,
    placeholder_tokens,
)
from mini_infer_engine.runtime.worker import ModelWorker

if TYPE_CHECKING:  # it imports transformers
    from mini_infer_engine.models.vision.encoder import VisionEncoder


class ImageEncoder:
    """The embeddings of images on a device, by key.

    In a pipeline the first stage has them; `encoder` is None on others, which know positions alone.
    """

    def __init__(self, encoder: "VisionEncoder | None", config: VisionConfig, device: torch.device) -> None:
        self._encoder, self._config, self._device = encoder, config, device
        self._embeddings: dict[bytes, Tensor] = {}

    def run(self, work: EncoderWork) -> None:
        """Drops embeddings, then encodes images one by one."""
        if self._encoder is None:
            return
        for key in work.dropped:
            self._embeddings.pop(key, None)
        for key, image in work.images:
            self._embeddings[key] = self._encode(self._encoder, image)

    def _encode(self, encoder: "VisionEncoder", image: ImageInput) -> Tensor:
        values = np.frombuffer(image.pixels, dtype="<f4", count=math.prod(image.shape)).reshape(image.shape)
        pixels = to_device(values.copy(), self._device).to(encoder.dtype)
        return encoder.encode(pixels, image.grid)

    def prepare(self, batch: Batch) -> PassImages | None:
        """Returns the images of a pass, or None if none of its rows has any."""
        if not any(row.images for row in batch.rows[batch.num_decodes :]):
            return None
        rows, config = batch.rows, self._config
        embedded, deepstack = None, None
        if self._encoder is not None:
            places, parts = placeholder_tokens(rows)
            tokens = to_device(places, self._device)
            embeddings = torch.cat([self._embeddings[key][first:last] for key, first, last in parts])
            own, *more = embeddings.split(self._encoder.hidden_size, dim=1)  # type: ignore[no-untyped-call]  # torch's
            embedded, deepstack = (tokens, own.contiguous()), DeepstackFeatures(tokens, tuple(more)) if more else None
        return PassImages(
            embedded,
            deepstack,
            to_device(grid_positions(rows), self._device) if config.has_grid_positions else None,
            to_device(last_visible_keys(rows), self._device) if config.is_bidirectional else None,
        )


def image_encoder_of(worker: ModelWorker) -> ImageEncoder | None:
    """Returns the encoder of a model that reads images, without embeddings; None for all others."""
    config = worker.config.vision
    return None if config is None else ImageEncoder(worker.model.vision, config, worker.device)
