"""Embedding lookup of a decode step: from each row's slot to its last token's embedding and its position."""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sizes import cdiv


@triton.jit
def _gather(
    slots,
    last_tokens,
    lengths,
    embedding,
    scales,
    hidden,
    positions,
    width,
    first_token,
    num_tokens,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row).to(tl.int64)
    token = tl.load(last_tokens + slot).to(tl.int64) - first_token
    mask = offsets < width
    is_here = (token >= 0) & (token < num_tokens)
    if scales is None:
        values = tl.load(embedding + token * width + offsets, mask=mask & is_here, other=0.0)
    else:
        integers = tl.load(embedding + token * width + offsets, mask=mask & is_here, other=0)
        scale = tl.load(scales + token, mask=is_here, other=0.0)
        values = (integers.to(tl.float32) * scale).to(hidden.dtype.element_ty)
    tl.store(hidden + row.to(tl.int64) * width + offsets, values, mask=mask)
    if tl.program_id(1) == 0:
        tl.store(positions + row, tl.load(lengths + slot).to(tl.int64))


def gather_decode_inputs(
    slots: torch.Tensor,
    last_tokens: torch.Tensor,
    lengths: torch.Tensor,
    embedding: torch.Tensor,
    *,
    first_token: int = 0,
    scales: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden [rows, width], positions [rows] int64) of the token sampled last in each slot.

    slots [rows] int32 index last_tokens and lengths (tokens in the cache, so the new token's position). The table may
    be a rank's, from `first_token` on: of other tokens the embedding is zeros. scales [tokens] fp32 where it is of
    integers, which become `dtype`.
    """
    rows, width = slots.shape[0], embedding.shape[1]
    hidden = torch.empty((rows, width), dtype=dtype or embedding.dtype, device=slots.device)
    positions = torch.empty(rows, dtype=torch.int64, device=slots.device)
    _gather[(rows, cdiv(width, 1024))](
        slots,
        last_tokens,
        lengths,
        embedding,
        scales,
        hidden,
        positions,
        width,
        first_token,
        embedding.shape[0],
        BLOCK=1024,
        num_warps=4,
    )
    return hidden, positions
