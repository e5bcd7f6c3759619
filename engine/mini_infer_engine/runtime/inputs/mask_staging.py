"""Token masks of grammars on their way to the device. Knows rows and words, not what they mean."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.core.batch import TokenMasks
from mini_infer_engine.runtime.inputs.host_staging import PinnedStaging


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
