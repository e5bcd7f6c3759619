"""The first kernel of a decode graph: from slots to embedded tokens, positions and where their KV goes."""

import torch
import triton
import triton.language as tl


@triton.jit
def _gather(
    slots,
    last_tokens,
    lengths,
    page_tables,
    embedding,
    hidden,
    positions,
    kv_index,
    table_stride,
    width,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row).to(tl.int64)
    token = tl.load(last_tokens + slot).to(tl.int64)
    inside = columns < width
    values = tl.load(embedding + token * width + columns, mask=inside)
    tl.store(hidden + row.to(tl.int64) * width + columns, values, mask=inside)
    if tl.program_id(1) == 0:
        position = tl.load(lengths + slot).to(tl.int64)
        page = tl.load(page_tables + slot * table_stride + position // PAGE_SIZE).to(tl.int64)
        tl.store(positions + row, position)
        tl.store(kv_index + row, page * PAGE_SIZE + position % PAGE_SIZE)


def gather_decode_inputs(
    slots: torch.Tensor,
    last_tokens: torch.Tensor,
    lengths: torch.Tensor,
    page_tables: torch.Tensor,
    embedding: torch.Tensor,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden [rows, width], positions [rows] int64, kv_index [rows] int64) of the token sampled last in each slot.

    slots [rows] int32 index last_tokens, lengths (tokens in the cache, so the new token's position) and page_tables.
    """
    rows, width = slots.shape[0], embedding.shape[1]
    hidden = torch.empty((rows, width), dtype=embedding.dtype, device=slots.device)
    positions = torch.empty(rows, dtype=torch.int64, device=slots.device)
    kv_index = torch.empty(rows, dtype=torch.int64, device=slots.device)
    _gather[(rows, triton.cdiv(width, 1024))](
        slots,
        last_tokens,
        lengths,
        page_tables,
        embedding,
        hidden,
        positions,
        kv_index,
        page_tables.stride(0),
        width,
        PAGE_SIZE=page_size,
        BLOCK=1024,
        num_warps=4,
    )
    return hidden, positions, kv_index
