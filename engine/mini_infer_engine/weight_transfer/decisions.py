"""Decides where weights are loaded from, and when a peer is too slow. Pure functions; time and rates are passed in."""

FAST_FILES_BYTES_PER_S = 2.5e9
"""Rate of files from which no peer is asked: they are in the page cache or on a fast disk, and cost no other engine."""
STALL_S = 3.0
"""Seconds without a byte after which a peer counts as gone."""
SETTLE_S = 1.0
"""Seconds before the rate of a peer is judged: its first pieces wait for pinned buffers and digests."""


def asks_peers(source: str, file_bytes_per_s: float | None, *, is_recomputed: bool) -> bool:
    """Returns True if peers are to be asked.

    `file_bytes_per_s` is the measured rate of the model's files, None if it is unknown. `is_recomputed` is True if
    loading from files rounds or calibrates weights, which a peer has done already.
    """
    if source != "auto":
        return source == "peers"
    return is_recomputed or file_bytes_per_s is None or file_bytes_per_s < FAST_FILES_BYTES_PER_S


def transfer_fault(*, done: int, total: int, elapsed_s: float, idle_s: float, file_bytes_per_s: float | None) -> str:
    """Returns the reason to give a transfer up, or an empty string.

    A transfer is slow if its rest takes longer than all bytes would from files. None for `file_bytes_per_s` compares
    nothing.
    """
    if idle_s > STALL_S:
        return f"no byte for {idle_s:.1f} s"
    if file_bytes_per_s is None or elapsed_s < SETTLE_S or done >= total:
        return ""
    rest_s = (total - done) * elapsed_s / done if done else float("inf")
    if rest_s > total / file_bytes_per_s:
        return f"{done / elapsed_s / 1e9:.2f} GB/s, and files have {file_bytes_per_s / 1e9:.2f} GB/s"
    return ""
