"""Changes the device's batch state other than by sampling: new slots, new pages, tokens sampled elsewhere."""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sampling.sampling_state import SamplingState
from mini_infer_engine.kernels.sizes import cdiv

STATE_FIELDS = 11
"""The number of int64 fields of a slot's packet.

They are: slot, last token, position, KV length, output index, noise seed, 1/temperature, top_k, top_p, min_p,
suppress_until. Floats are the bits of fp64.
"""


@triton.jit
def _update_slots(
    packet,
    last_tokens,
    positions,
    kv_lengths,
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
    tl.store(positions + slot, tl.load(row + 2).to(tl.int32))
    tl.store(kv_lengths + slot, tl.load(row + 3).to(tl.int32))
    tl.store(output_indexes + slot, tl.load(row + 4).to(tl.int32))
    tl.store(samplings + slot, tl.load(row + 4).to(tl.int32))
    tl.store(noise_seeds + slot, tl.load(row + 5))
    tl.store(inverse_temperatures + slot, tl.load(row + 6).to(tl.float64, bitcast=True).to(tl.float32))
    tl.store(top_ks + slot, tl.load(row + 7).to(tl.int32))
    tl.store(top_ps + slot, tl.load(row + 8).to(tl.float64, bitcast=True).to(tl.float32))
    tl.store(min_ps + slot, tl.load(row + 9).to(tl.float64, bitcast=True).to(tl.float32))
    tl.store(suppress_until + slot, tl.load(row + 10).to(tl.int32))


@triton.jit(do_not_specialize=["count"])
def _update_pages(packet, page_tables, count, BLOCK: tl.constexpr):
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entries < count
    at = tl.load(packet + 2 * entries, mask=inside)
    page = tl.load(packet + 2 * entries + 1, mask=inside)
    tl.store(page_tables + at, page.to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["padding_slot"])
def _advance_slots(slots, positions, kv_lengths, padding_slot):
    """Advances with one program per row."""
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    if slot != padding_slot:
        tl.store(positions + slot, tl.load(positions + slot) + 1)
        tl.store(kv_lengths + slot, tl.load(kv_lengths + slot) + 1)


def update_slots(packet: torch.Tensor, state: SamplingState) -> None:
    """Writes new slots from a packet [slots, STATE_FIELDS] int64 on the device."""
    _update_slots[(packet.shape[0],)](
        packet,
        state.last_tokens,
        state.positions,
        state.kv_lengths,
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


def advance_slots(slots: torch.Tensor, state: SamplingState) -> None:
    """Advances slots [rows] int32 by one token, each at most once; the last slot of `state` does not advance."""
    _advance_slots[(slots.shape[0],)](
        slots, state.positions, state.kv_lengths, state.last_tokens.shape[0] - 1, num_warps=1
    )


def update_pages(packet: torch.Tensor, page_tables: torch.Tensor) -> None:
    """Writes pages by a packet [entries, 2] int64 on the device: flat index in page_tables [slots, width], page id."""
    count = packet.shape[0]
    _update_pages[(cdiv(count, 256),)](packet, page_tables, count, BLOCK=256, num_warps=2)
