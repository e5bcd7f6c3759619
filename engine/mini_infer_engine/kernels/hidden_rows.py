"""Stores rows of hidden states in pages and reads them, by the places of their tokens: scatter and gather of rows."""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sizes import cdiv

_BLOCK = 2048


@triton.jit
def _store(rows, kv_index, states, width, BLOCK: tl.constexpr):
    """Scatters one block of a row to its place, with one program per (token, block)."""
    token, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(kv_index + token).to(tl.int64)
    mask = (columns < width) & (at >= 0)
    tl.store(rows + at * width + columns, tl.load(states + token * width + columns, mask=mask), mask=mask)


@triton.jit
def _store_decoded(
    rows, page_table, table_width, slots, kv_lengths, states, width, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Scatters one block of a row to the place behind its sequence's cached tokens: one program per (row, block)."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(kv_lengths + row).to(tl.int64)
    mask = (columns < width) & (length >= 0) & (length // PAGE_SIZE < table_width)
    place = tl.minimum(tl.maximum(length, 0) // PAGE_SIZE, table_width - 1)
    page = tl.load(page_table + tl.load(slots + row).to(tl.int64) * table_width + place).to(tl.int64)
    to = rows + (page * PAGE_SIZE + length % PAGE_SIZE) * width
    tl.store(to + columns, tl.load(states + row * width + columns, mask=mask), mask=mask)


@triton.jit
def _read(rows, kv_index, out, width, BLOCK: tl.constexpr):
    """Gathers one block of a row from its place, zeros if it has none: one program per (token, block)."""
    token, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(kv_index + token).to(tl.int64)
    inside = columns < width
    values = tl.load(rows + at * width + columns, mask=inside & (at >= 0), other=0.0)
    tl.store(out + token * width + columns, values, mask=inside)


def store_rows(rows: torch.Tensor, kv_index: torch.Tensor, states: torch.Tensor) -> None:
    """Stores states [tokens, width] in rows [places, width] at kv_index [tokens]; negative: nowhere."""
    tokens, width = states.shape
    if tokens:
        _store[(tokens, cdiv(width, _BLOCK))](rows, kv_index, states.contiguous(), width, BLOCK=_BLOCK, num_warps=4)


def store_decoded_rows(
    rows: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    kv_lengths: torch.Tensor,
    states: torch.Tensor,
    page_size: int,
) -> None:
    """Stores states [rows, width] of the tokens at kv_lengths [rows] of sequences in slots [rows]; negative: nowhere.

    page_table [slots, pages], dense.
    """
    count, width = states.shape
    _store_decoded[(count, cdiv(width, _BLOCK))](
        rows,
        page_table,
        page_table.shape[1],
        slots,
        kv_lengths,
        states.contiguous(),
        width,
        PAGE_SIZE=page_size,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def read_rows(rows: torch.Tensor, kv_index: torch.Tensor) -> torch.Tensor:
    """Returns the rows at kv_index [tokens] as [tokens, width]; zeros for negative ones."""
    tokens, width = kv_index.shape[0], rows.shape[1]
    out = torch.empty((tokens, width), dtype=rows.dtype, device=rows.device)
    if tokens:
        _read[(tokens, cdiv(width, _BLOCK))](rows, kv_index, out, width, BLOCK=_BLOCK, num_warps=4)
    return out
