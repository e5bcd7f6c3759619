"""Identifies a process of this host, and checks if it still runs, for the owners of resources that it shares."""

import os
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from mini_infer_engine.kv_transfer.topology.locality import host_domain

_ENDED = ("Z", "X")
"""States of a process that has ended, though its parent has not waited for it (zombie, dead)."""


class ProcessName(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies one process of one host, and no later one with the same PID."""

    domain: Annotated[str, Meta(max_length=512)]
    """Processes with the same domain see each other's PIDs and memory. Empty if no process sees it."""
    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    started: int
    """Start time in clock ticks since the host's boot."""

    @property
    def is_near(self) -> bool:
        """True if this process is in the same domain."""
        return bool(self.domain) and self.domain == host_domain()

    @property
    def is_alive(self) -> bool:
        """True if the process still runs. Only valid if it is near."""
        return _started(self.pid) == self.started


def this_process() -> ProcessName:
    """Returns the name of the calling process."""
    return ProcessName(domain=host_domain(), pid=os.getpid(), started=_started(os.getpid()) or 0)


def _started(pid: int) -> int | None:
    """Returns a process's start time from /proc/PID/stat (proc_pid_stat(5)), or None if it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # its name may have blanks
    except OSError:
        return None
    return None if fields[0] in _ENDED else int(fields[19])
