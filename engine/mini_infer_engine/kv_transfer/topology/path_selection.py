"""By which way keys and values go to a peer: by copies of our own or by NIXL, and by NIXL directly from pool to pool or
through staging buffers. Pure.
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from mini_infer_engine.kv_transfer.layout import KVLayout, Span
from mini_infer_engine.kv_transfer.staging_slots import Area, moves_whole_pages

DIRECT_RATES = {
    "cuda": ((16 << 10, 2.5e9), (64 << 10, 11e9), (256 << 10, 45e9), (1 << 20, 165e9), (7 << 20, 290e9)),
    "cpu": ((512, 0.12e9), (4 << 10, 1.0e9), (64 << 10, 2.6e9), (1 << 20, 3.8e9)),
}
"""Bytes a second that NIXL writes in pieces of so many bytes: between two H200s of one host, and in main memory."""
MAPPED_RATES = ((512, 13e9), (16 << 10, 90e9), (64 << 10, 177e9), (256 << 10, 225e9), (7 << 20, 268e9))
"""The same of our kernel that copies to a peer's memory, between the same GPUs; of 512 bytes by the 34 ns that each
piece takes the host."""
_MAPPED_START_S, _NIXL_START_S = 0.0001, 0.00027
"""Of a piece that is alone."""
_STAGED_RATES = {"cuda": 9e9, "cpu": 1.0e9}
"""Of a whole that is gathered, moved in slots of megabytes and put in place: between the same GPUs through slots on
them (through pinned memory 3.9e9), and in main memory."""
_STAGED_START_S = 0.001
"""Of the first slot: two copies and three messages."""
_STAGED_GAIN = 2.0
"""What staging must save, as a ratio: a direct write needs nobody at the other side, and hides behind the prefill."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a process runs, as far as it decides how its memory can be reached."""

    ipc_domain: str
    """Processes of the same one can open each other's GPU memory (CUDA IPC); empty: none can."""
    has_rdma: bool


def is_direct(ours: Place, our_device: str, theirs: Place, their_device: str) -> bool:
    """Whether a pool is reached without copies through the host: else UCX makes them, at a few hundred MB/s."""
    if our_device != their_device:
        return False
    if our_device == "cpu" or (ours.ipc_domain and ours.ipc_domain == theirs.ipc_domain):
        return True
    return ours.has_rdma and theirs.has_rdma


def direct_rate(piece_bytes: int, table: Sequence[tuple[int, float]]) -> float:
    """Bytes a second in pieces of this size, on straight lines between the table's; below it a piece costs the same."""
    first_size, first_rate = table[0]
    if piece_bytes <= first_size:
        return first_rate * piece_bytes / first_size
    for (low, low_rate), (high, high_rate) in pairwise(table):
        if piece_bytes <= high:
            return low_rate + (high_rate - low_rate) * (piece_bytes - low) / (high - low)
    return table[-1][1]


def _pieces_of(ours: KVLayout, theirs: KVLayout, span: Span) -> tuple[int, int]:
    """Bytes of a piece of a span, about, and of all."""
    low, high = span.layers or (0, ours.num_layers)
    if moves_whole_pages(ours, theirs):
        piece = (high - low) * ours.layer_bytes
    elif ours.num_heads == theirs.num_heads:
        piece = min(ours.page_size, theirs.page_size) * ours.row_bytes
    else:
        piece = min(ours.num_heads, theirs.num_heads) * ours.head_bytes
    return piece, (span.end - span.begin) * (high - low) * ours.halves * ours.row_bytes


def staging_pays(ours: KVLayout, theirs: KVLayout, span: Span, device: str) -> bool:
    """Whether the pieces of a span are so small that gathering them is worth it, by measured rates."""
    piece, num_bytes = _pieces_of(ours, theirs, span)
    direct_s = num_bytes / direct_rate(piece, DIRECT_RATES[device])
    return direct_s > _STAGED_GAIN * (_STAGED_START_S + num_bytes / _STAGED_RATES[device])


def mapping_pays(ours: KVLayout, theirs: KVLayout, span: Span, nixl_way: Area | None) -> bool:
    """Whether copies of our own between two GPUs take no longer than NIXL, by measured rates.

    nixl_way: the staging buffer that NIXL would use; None: it would go from pool to pool.
    """
    piece, num_bytes = _pieces_of(ours, theirs, span)
    mapped_s = _MAPPED_START_S + num_bytes / direct_rate(piece, MAPPED_RATES)
    if nixl_way is None:
        return mapped_s <= _NIXL_START_S + num_bytes / direct_rate(piece, DIRECT_RATES["cuda"])
    return mapped_s <= _STAGED_START_S + num_bytes / _STAGED_RATES["cuda"]


def choose_way(
    ours: KVLayout,
    theirs: KVLayout,
    span: Span,
    *,
    device: str,
    can_be_direct: bool,
    through_host: bool,
) -> Area | None:
    """The staging buffer that a span goes through; None: it goes from pool to pool. `device`: of the pool here.

    through_host: everything is to go through main memory (--kv-transport nixl-host).
    """
    if through_host or not can_be_direct:
        return "host"
    if ours.dtype != theirs.dtype or staging_pays(ours, theirs, span, device):
        return "device" if device == "cuda" else "host"
    return None
