"""Implements `DiskMemory` where the disk has failed before the start: a faulty disk costs its tier, not the engine."""

import errno

from mini_infer_engine.core.kv_tiers.page_record import PageRecord
from mini_infer_engine.core.kv_tiers.tier_memory import DiskMoved, DiskPage

_FAULTS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ETIMEDOUT)
"""Errors of disks that worked when their engine was set up. File systems become read-only after an I/O error."""


def is_fault(error: OSError) -> bool:
    """Returns True if the disk has failed, and False if it is the folder's name or owner that is wrong."""
    return error.errno in _FAULTS


class FailedDisk:
    """A disk that holds nothing. Its tier is off from the start."""

    capacity_bytes = used_bytes = 0
    latency_s = 0.0
    bytes_per_s = 1.0

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def take_recovered(self) -> list[DiskPage]:
        """Returns nothing."""
        return []

    def write(self, ticket: int, host_page: int, record: PageRecord) -> None:
        """Raises OSError."""
        raise OSError(self.fault)

    def read(self, ticket: int, location: int, host_page: int) -> None:
        """Raises OSError."""
        raise OSError(self.fault)

    def take(self) -> list[DiskMoved]:
        """Returns nothing."""
        return []

    def take_dropped(self) -> list[int]:
        """Returns nothing."""
        return []

    def wait(self, timeout_s: float) -> None:
        """Returns at once."""

    def clear(self) -> None:
        """Does nothing."""
