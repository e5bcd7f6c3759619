"""Copies of the first tokens of pages to others, all layers, by one launch: for beams that fork within a page."""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sizes import cdiv

_BLOCK = 4096


@triton.jit
def _copy_pages(pages, packet, page_elements, half_elements, token_elements, BLOCK: tl.constexpr):
    """Program (copy, layer's keys or values, block of the page's tokens)."""
    line = packet + tl.program_id(0) * 3
    source = tl.load(line).to(tl.int64)
    target = tl.load(line + 1).to(tl.int64)
    count = tl.load(line + 2) * token_elements
    begin = tl.program_id(2) * BLOCK
    if begin < count:
        offs = begin + tl.arange(0, BLOCK)
        half = pages + tl.program_id(1).to(tl.int64) * half_elements
        values = tl.load(half + source * page_elements + offs, mask=offs < count)
        tl.store(half + target * page_elements + offs, values, mask=offs < count)


def copy_pages(pages: torch.Tensor, packet: torch.Tensor) -> None:
    """Copy within pages [pages, layers, entries, page_size, heads, head_dim], dense.

    packet [copies, 3] int32 on the device: source page, target page, tokens. No target is another copy's source.
    """
    _, layers, entries, page_size, heads, head_dim = pages.shape
    half_elements = page_size * heads * head_dim
    grid = (packet.shape[0], layers * entries, cdiv(half_elements, _BLOCK))
    page_elements = layers * entries * half_elements
    _copy_pages[grid](pages, packet, page_elements, half_elements, heads * head_dim, BLOCK=_BLOCK, num_warps=4)
