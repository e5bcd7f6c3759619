"""Scatter of the host's changes into the device's batch state: new slots, and new pages of old ones."""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sampling.sampling_state import SamplingState
from mini_infer_engine.kernels.sizes import cdiv

STATE_FIELDS = 10
"""slot, last token, length, output index, noise seed, 1/temperature, top_k, top_p, min_p, suppress_until.

Floats are the bits of fp64.
"""


@triton.jit
def _update_slots(
    packet,
    last_tokens,
    lengths,
    output_indexes,
    samplings,
    noise_seeds,
    inverse_temperatures,
    top_ks,
    top_ps,
    min_ps,
    suppress_until,
    FIELDS: tl.constexpr,
):
    row = packet + tl.program_id(0) * FIELDS
    slot = tl.load(row)
    tl.store(last_tokens + slot, tl.load(row + 1))
    tl.store(lengths + slot, tl.load(row + 2).to(tl.int32))
    tl.store(output_indexes + slot, tl.load(row + 3).to(tl.int32))
    tl.store(samplings + slot, tl.load(row + 3).to(tl.int32))
    tl.store(noise_seeds + slot, tl.load(row + 4))
    tl.store(inverse_temperatures + slot, tl.load(row + 5).to(tl.float64, bitcast=True).to(tl.float32))
    tl.store(top_ks + slot, tl.load(row + 6).to(tl.int32))
    tl.store(top_ps + slot, tl.load(row + 7).to(tl.float64, bitcast=True).to(tl.float32))
    tl.store(min_ps + slot, tl.load(row + 8).to(tl.float64, bitcast=True).to(tl.float32))
    tl.store(suppress_until + slot, tl.load(row + 9).to(tl.int32))


@triton.jit(do_not_specialize=["count"])
def _update_pages(packet, page_tables, count, BLOCK: tl.constexpr):
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entries < count
    at = tl.load(packet + 2 * entries, mask=inside)
    page = tl.load(packet + 2 * entries + 1, mask=inside)
    tl.store(page_tables + at, page.to(tl.int32), mask=inside)


def update_slots(packet: torch.Tensor, state: SamplingState) -> None:
    """Packet [slots, STATE_FIELDS] int64 on the device."""
    _update_slots[(packet.shape[0],)](
        packet,
        state.last_tokens,
        state.lengths,
        state.output_indexes,
        state.samplings,
        state.noise_seeds,
        state.inverse_temperatures,
        state.top_ks,
        state.top_ps,
        state.min_ps,
        state.suppress_until,
        FIELDS=STATE_FIELDS,
        num_warps=1,
    )


def update_pages(packet: torch.Tensor, page_tables: torch.Tensor) -> None:
    """Packet [entries, 2] int64 on the device: flat index into page_tables [slots, width], page id."""
    count = packet.shape[0]
    _update_pages[(cdiv(count, 256),)](packet, page_tables, count, BLOCK=256, num_warps=2)
