"""Makes additive attention masks once a pass: a boolean one would be converted in every layer."""

import torch
from torch import Tensor

from mini_infer_engine.runtime.inputs.batch_tensors import PassInputs


def decode_masks(
    inputs: PassInputs, longest: int, windows: set[int | None], dtype: torch.dtype
) -> dict[int | None, Tensor]:
    """Returns a mask [decode rows, longest] for each window: 0 where a row's one query sees that cache index, -inf
    elsewhere.

    A window of n tokens covers the last n cache indexes, as `Row.position_offset` explains.
    """
    cache_indexes = torch.arange(longest, device=inputs.ends.device)
    ends = inputs.ends[: inputs.num_decodes, None]
    visible = cache_indexes < ends
    return {
        window: additive(visible if window is None else visible & (cache_indexes >= ends - window), dtype)
        for window in windows
    }


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns 0 where visible, -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
