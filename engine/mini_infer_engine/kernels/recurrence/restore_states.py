"""Brings recurrent states back behind rejected draft tokens, by copies of whole slots that the device chooses."""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sizes import cdiv

_BLOCK = 2048
"""Words of 8 bytes that a program copies at a time."""
_MOST_PROGRAMS = 64
"""Programs for each row: they loop over the rest of a slot, which may have 75 MB."""


@triton.jit(do_not_specialize=["first", "padding_slot"])
def _restore(
    words,
    slot_words,
    slots,
    made,
    made_stride,
    first,
    padding_slot,
    DRAFTS: tl.constexpr,
    PER_SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies a part of the state of one row with one program per (row, some blocks of the slot)."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    kept = tl.load(made + row * made_stride).to(tl.int64)
    if (slot != padding_slot) & (kept >= 1) & (kept <= DRAFTS):
        source = first + slot * PER_SLOT + kept - 1
        for begin in range(tl.program_id(1) * BLOCK, slot_words, tl.num_programs(1) * BLOCK):
            offs = begin + tl.arange(0, BLOCK)
            mask = offs < slot_words
            tl.store(
                words + slot * slot_words + offs, tl.load(words + source * slot_words + offs, mask=mask), mask=mask
            )


def restore_states(
    storage: torch.Tensor, slots: torch.Tensor, made: torch.Tensor, first: int, per_slot: int, padding_slot: int
) -> None:
    """Copies the state after the tokens that a row has made to its slot, unless all of its draft tokens were accepted.

    `storage` [slots, layers, bytes] uint8 has the states; `slots` [rows] int32; `made` [rows, 2 + draft tokens] int64
    begins with the number of tokens that a row has made. The state before the n-th draft token of a slot is at
    `first + slot * per_slot + n`.
    """
    words = storage.view(storage.shape[0], -1).view(torch.int64)
    programs = min(_MOST_PROGRAMS, cdiv(words.shape[1], _BLOCK))
    _restore[(len(slots), programs)](
        words,
        words.shape[1],
        slots,
        made,
        made.stride(0),
        first,
        padding_slot,
        DRAFTS=made.shape[1] - 2,
        PER_SLOT=per_slot,
        BLOCK=_BLOCK,
        num_warps=8,
    )
