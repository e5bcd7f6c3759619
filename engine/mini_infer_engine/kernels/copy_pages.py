"""Copies the first tokens of pages to other pages, in all layers, by one launch: for beams that fork within a page."""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sizes import cdiv

_BLOCK = 4096


@triton.jit
def _copy_pages(pages, packet, page_elements, half_elements, token_elements, SCALES: tl.constexpr, BLOCK: tl.constexpr):
    """Copies with one program per (copy, layer's keys or values, block of the page's tokens)."""
    line = packet + tl.program_id(0) * 3
    source = tl.load(line).to(tl.int64)
    target = tl.load(line + 1).to(tl.int64)
    count = tl.load(line + 2) * token_elements
    begin = tl.program_id(2) * BLOCK
    some = begin < count
    if SCALES:
        some = some | (begin + BLOCK > half_elements - SCALES)
    if some:
        offs = begin + tl.arange(0, BLOCK)
        mask = offs < count
        if SCALES:
            mask = mask | ((offs >= half_elements - SCALES) & (offs < half_elements))
        half = pages + tl.program_id(1).to(tl.int64) * half_elements
        values = tl.load(half + source * page_elements + offs, mask=mask)
        tl.store(half + target * page_elements + offs, values, mask=mask)


def copy_pages(pages: torch.Tensor, packet: torch.Tensor) -> None:
    """Copies within pages [pages, layers, entries, page_size, heads, head_dim], dense but for scales after entries.

    packet [copies, 3] int32 on the device: source page, target page, tokens. No target is another copy's source. Scales
    of quantised pages are copied whole, including those of tokens that have not been written yet.
    """
    _, layers, entries, page_size, heads, head_dim = pages.shape
    half_elements = pages.stride(2)
    scales = half_elements - page_size * heads * head_dim
    grid = (packet.shape[0], layers * entries, cdiv(half_elements, _BLOCK))
    words = pages.view(torch.int8) if pages.itemsize == 1 else pages
    _copy_pages[grid](
        words, packet, pages.stride(0), half_elements, heads * head_dim, SCALES=scales, BLOCK=_BLOCK, num_warps=4
    )
