"""Copies token masks of grammars to the device. Knows rows and words, not what they mean."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.core.batch import TokenMasks
from mini_infer_engine.runtime.inputs.host_staging import PinnedStaging


class MaskStaging:
    """The staging buffers of one user of masks. They are allocated with the first masks: most engines never see any."""

    def __init__(self, most: int, uploads_in_flight: int, device: torch.device) -> None:
        """Prepares buffers of `most` masks, without allocating them."""
        self._most, self._depth, self._device = most, uploads_in_flight, device
        self._staging: PinnedStaging | None = None

    def packed(self, masks: TokenMasks, lines: Mapping[tuple[int, int], int]) -> Tensor | None:
        """Returns the input of `apply_token_masks` on the device, or None if no mask is for any of `lines`.

        `lines` maps (row of the batch, draft tokens before it) to the line of the logits that the mask is for.
        """
        places = masks.places or [0] * len(masks.rows)
        found = [lines.get(place, -1) for place in zip(masks.rows, places, strict=True)]
        numbers = [number for number, line in enumerate(found) if line >= 0]
        if not numbers:
            return None
        if self._staging is None:
            packed = torch.zeros((self._most, 1 + masks.bits.shape[1]), dtype=torch.int32, device=self._device)
            self._staging = PinnedStaging(packed, self._depth)
        array = self._staging.arrays[self._staging.begin()]
        bits, count = masks.bits.view(np.int32), len(numbers)
        array[:count, 0] = [found[number] for number in numbers]
        array[:count, 1:] = bits if count == len(bits) else bits[numbers]  # half a megabyte: not twice where all go
        return self._staging.send(count)
