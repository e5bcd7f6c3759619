"""Which process something belongs to, for whoever keeps it open: how it is named, and whether it still lives."""

import os
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from mini_infer_engine.kv_transfer.topology.locality import host_domain

_ENDED = ("Z", "X")
"""States of a process whose memory is gone, though its parent has not asked for it."""


class ProcessName(msgspec.Struct, frozen=True, kw_only=True):
    """One process of one host, and no later one of the same number."""

    domain: Annotated[str, Meta(max_length=512)]
    """Processes with the same one see each other's numbers and memory; empty: nobody sees it."""
    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    started: int
    """In clock ticks since the host's start."""

    @property
    def is_near(self) -> bool:
        """Whether this process is in the same domain."""
        return bool(self.domain) and self.domain == host_domain()

    @property
    def is_alive(self) -> bool:
        """Of one that is near."""
        return _started(self.pid) == self.started


def this_process() -> ProcessName:
    """The one that asks."""
    return ProcessName(domain=host_domain(), pid=os.getpid(), started=_started(os.getpid()) or 0)


def _started(pid: int) -> int | None:
    """When a process was started; None: there is none. See proc_pid_stat(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # its name may have blanks
    except OSError:
        return None
    return None if fields[0] in _ENDED else int(fields[19])
