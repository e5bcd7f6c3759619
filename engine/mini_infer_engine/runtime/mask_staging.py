"""Token masks of grammars on their way to the device. Knows rows and words, not what they mean."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.core.batch import TokenMasks
from mini_infer_engine.runtime.staging import PinnedStaging


class MaskStaging:
    """Of one place where masks are needed. Its buffers are made with the first masks: most engines never see any."""

    def __init__(self, most: int, uploads_in_flight: int, device: torch.device) -> None:
        """`most` masks at a time."""
        self._most, self._depth, self._device = most, uploads_in_flight, device
        self._staging: PinnedStaging | None = None

    def packed(self, masks: TokenMasks, lines: Mapping[tuple[int, int], int]) -> Tensor | None:
        """What `apply_token_masks` reads, on the device; None: no mask is for any of `lines`.

        `lines`: by row of the batch and guesses before it, the line of the logits that the mask is for.
        """
        found = [
            (number, line)
            for number, (row, place, _) in enumerate(masks.entries())
            if (line := lines.get((row, place))) is not None
        ]
        if not found:
            return None
        if self._staging is None:
            packed = torch.zeros((self._most, 1 + masks.bits.shape[1]), dtype=torch.int32, device=self._device)
            self._staging = PinnedStaging(packed, self._depth)
        array = self._staging.arrays[self._staging.begin()]
        numbers, chosen = zip(*found, strict=True)
        array[: len(found), 0] = chosen
        array[: len(found), 1:] = masks.bits.view(np.int32)[list(numbers)]
        return self._staging.send(len(found))
