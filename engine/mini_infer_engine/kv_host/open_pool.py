"""Opens the shared pool of an engine: a file in a folder, or the memory that a server's processes have in common."""

import errno
import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mini_infer_engine.kv_host.pool_file import PoolFile, PoolLayout

_RECORD_BYTES, _RECORD_BYTES_PER_TOKEN, _RECORD_ALIGNMENT = 1536, 6, 64
_SUFFIX = ".pool"
_PROCESS_FILES = "/proc/"
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")


def anonymous_pool() -> tuple[int, str]:
    """Returns the file descriptor of memory that is freed when the last process that uses it ends, and the path by
    which this process's children open it.
    """
    file = os.memfd_create("mini-infer-kv-host")
    return file, f"{_PROCESS_FILES}{os.getpid()}/fd/{file}"


def is_anonymous(path: str) -> bool:
    """Returns True if a path is one of `anonymous_pool`."""
    return path.startswith(_PROCESS_FILES)


def record_bytes(page_tokens: int) -> int:
    """Returns the bytes for the record of a page of so many tokens, with a salt of up to a thousand characters."""
    needed = _RECORD_BYTES + page_tokens * _RECORD_BYTES_PER_TOKEN
    return -(-needed // _RECORD_ALIGNMENT) * _RECORD_ALIGNMENT


def open_pool(
    path: str,
    num_bytes: int,
    page_bytes: int,
    page_tokens: int,
    identity: str,
    available_bytes: Callable[[], int] = lambda: 1 << 62,
    smallest: Callable[[int], int] = int,
) -> PoolFile:
    """Opens the pool of at most `num_bytes` for pages of this identity. Pools of others in the folder are removed if no
    process uses them: their engines have ended, or have another model now. A new one has `smallest` of the slots for
    which there is room.

    Raises OSError if it cannot be opened or if `available_bytes` of memory are too few for a new one, and ValueError if
    the size is too small.
    """
    layout = PoolLayout.within(num_bytes, page_bytes, record_bytes(page_tokens), identity)
    layout = replace(layout, num_slots=smallest(layout.num_slots))
    if is_anonymous(path):
        return PoolFile(Path(path), layout, reserves=False, available_bytes=available_bytes)
    folder = Path(path).expanduser()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = f"{identity[:32]}{_SUFFIX}"
    for file in folder.glob(f"*{_SUFFIX}"):
        if file.name != name and PoolFile.is_left(file):
            with suppress(OSError):
                file.unlink()
    return PoolFile(folder / name, layout, reserves=True, available_bytes=available_bytes)


def open_part(
    path: str,
    num_bytes: int,
    page_bytes: int,
    page_tokens: int,
    identity: str,
    available_bytes: Callable[[], int],
    rank: int,
    smallest: Callable[[int], int],
) -> PoolFile:
    """Opens a rank's part of a pool of which all ranks of a model have one, in a folder of its own.

    A page has the same slot in all parts, and what is in a slot stands in the first rank's part alone. That is void if
    any rank has no former part (`PoolFile.is_void`). `smallest` returns the smallest number of all ranks.

    Raises OSError and ValueError as `open_pool` does, and OSError if the parts have different numbers of slots.
    """
    own = hashlib.sha256(f"{identity}, rank {rank}".encode()).hexdigest()
    folder = f"{path}/rank-{rank}"
    file = open_pool(folder, num_bytes, page_bytes, page_tokens, own, available_bytes, smallest)
    num_slots = file.layout.num_slots
    if smallest(num_slots) != -smallest(-num_slots):
        raise OSError(errno.EBUSY, "engines with another --kv-host-memory have made the parts of other ranks")
    file.is_void = not smallest(int(file.was_found))
    return file


def is_in_memory(path: Path, mounts: str) -> bool:
    """Returns True if a path is on a file system in memory, by the contents of /proc/mounts, or if that is unknown."""
    found, kind = "", ""
    for line in mounts.splitlines():
        _, folder, file_system, *_ = line.split(" ")
        if len(folder) >= len(found) and path.is_relative_to(folder):  # the last of several hides the others
            found, kind = folder, file_system
    return not kind or kind in _IN_MEMORY
