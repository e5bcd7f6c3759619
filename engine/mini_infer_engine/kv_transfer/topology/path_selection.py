"""Chooses the path of keys and values to a peer: our own copies or NIXL; by NIXL directly between pools or through
staging buffers. Pure functions.
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
"""Bytes per second that NIXL writes, by the size of a piece in bytes: between two H200s of one host, and in main
memory.
"""
MAPPED_RATES = ((512, 13e9), (16 << 10, 90e9), (64 << 10, 177e9), (256 << 10, 225e9), (7 << 20, 268e9))
"""Bytes per second of our copy kernel, by the size of a piece, between two H200s of one host. At 512 bytes the host
limits it: it needs 34 ns for each piece.
"""
_MAPPED_START_S, _NIXL_START_S = 0.0001, 0.00027
"""Seconds of a transfer of a single small piece."""
_STAGED_RATES = {"cuda": 9e9, "cpu": 1.0e9}
"""Bytes per second of a staged transfer: gathered, moved in slots of megabytes and copied into pages. Between two H200s
through slots on them (through pinned memory 3.9e9), and in main memory.
"""
_STAGED_START_S = 0.001
"""Seconds until the first slot has arrived: two copies and three messages."""
_STAGED_GAIN = 2.0
"""The least ratio of direct to staged time at which staging pays: a direct write needs no work of the peer, and
overlaps the prefill.
"""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a process's location that decide how its memory can be reached."""

    ipc_domain: str
    """Processes with the same domain can open each other's GPU memory (CUDA IPC). Empty if no process can."""
    has_rdma: bool


def is_direct(ours: Place, our_device: str, theirs: Place, their_device: str) -> bool:
    """Returns True if a pool is reached without copies through the host; UCX makes them otherwise, at a few hundred
    MB/s.
    """
    if our_device != their_device:
        return False
    if our_device == "cpu" or (ours.ipc_domain and ours.ipc_domain == theirs.ipc_domain):
        return True
    return ours.has_rdma and theirs.has_rdma


def direct_rate(piece_bytes: int, table: Sequence[tuple[int, float]]) -> float:
    """Returns the bytes per second in pieces of this size, interpolated linearly. A piece smaller than the table's
    smallest takes as long as that one.
    """
    first_size, first_rate = table[0]
    if piece_bytes <= first_size:
        return first_rate * piece_bytes / first_size
    for (low, low_rate), (high, high_rate) in pairwise(table):
        if piece_bytes <= high:
            return low_rate + (high_rate - low_rate) * (piece_bytes - low) / (high - low)
    return table[-1][1]


def _pieces_of(ours: KVLayout, theirs: KVLayout, span: Span) -> tuple[int, int]:
    """Returns the approximate bytes of a piece of a span, and the bytes of the whole span."""
    low, high = span.layers or (0, ours.num_layers)
    if moves_whole_pages(ours, theirs):
        piece = (high - low) * ours.layer_bytes
    elif ours.num_heads == theirs.num_heads:
        piece = min(ours.page_size, theirs.page_size) * ours.row_bytes
    else:
        piece = min(ours.num_heads, theirs.num_heads) * ours.head_bytes
    return piece, (span.end - span.begin) * (high - low) * ours.halves * ours.row_bytes


def staging_pays(ours: KVLayout, theirs: KVLayout, span: Span, device: str) -> bool:
    """Returns True if, by measured rates, the pieces of a span are so small that gathering them is faster."""
    piece, num_bytes = _pieces_of(ours, theirs, span)
    direct_s = num_bytes / direct_rate(piece, DIRECT_RATES[device])
    return direct_s > _STAGED_GAIN * (_STAGED_START_S + num_bytes / _STAGED_RATES[device])


def mapping_pays(ours: KVLayout, theirs: KVLayout, span: Span, nixl_area: Area | None) -> bool:
    """Returns True if, by measured rates, our own copies between two GPUs take no longer than NIXL.

    `nixl_area` is the staging buffer that NIXL would use, or None if it would write from pool to pool.
    """
    piece, num_bytes = _pieces_of(ours, theirs, span)
    mapped_s = _MAPPED_START_S + num_bytes / direct_rate(piece, MAPPED_RATES)
    if nixl_area is None:
        return mapped_s <= _NIXL_START_S + num_bytes / direct_rate(piece, DIRECT_RATES["cuda"])
    return mapped_s <= _STAGED_START_S + num_bytes / _STAGED_RATES["cuda"]


def choose_path(
    ours: KVLayout,
    theirs: KVLayout,
    span: Span,
    *,
    device: str,
    can_be_direct: bool,
    through_host: bool,
) -> Area | None:
    """Returns the staging buffer through which a span goes, or None if it goes from pool to pool.

    `device` is the device of our pool. `through_host` sends everything through main memory (--kv-transport nixl-host).
    """
    if through_host or not can_be_direct:
        return "host"
    if ours.dtype != theirs.dtype or staging_pays(ours, theirs, span, device):
        return "device" if device == "cuda" else "host"
    return None
