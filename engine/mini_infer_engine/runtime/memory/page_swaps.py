"""Copies rows of pages between a device and main memory, for preempted sequences."""

from torch import Tensor

from mini_infer_engine.core.batch import Transfers


def swap_rows(rows: Tensor, host_rows: Tensor, transfers: Transfers) -> None:
    """Queues the copies of a pass between the device's rows [pages, ...] and those of main memory."""
    for swap in transfers.swap_out:
        host_rows[swap.host_page].copy_(rows[swap.device_page], non_blocking=True)
    for swap in transfers.swap_in:
        rows[swap.device_page].copy_(host_rows[swap.host_page], non_blocking=True)
