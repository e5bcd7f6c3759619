"""Finds folders in memory for the KV cache of local engines: blocks survive an engine there, and end with the service.

Nothing of a service that was killed stays for long: the user's next `mini-infer up` removes it, unless it is of the
same service, whose engines find their blocks again.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MEMORY = Path("/dev/shm")


def _prefix() -> str:
    return f"mini-infer-kv-{os.getuid()}-"


def _service_folder(state: Path) -> Path:
    digest = hashlib.sha256(str(state.resolve()).encode()).hexdigest()[:16]
    return MEMORY / f"{_prefix()}{digest}"


def engine_folder(state: Path, engine: str) -> str:
    """Returns the folder of an engine of the service whose state is in `state`; "" without a file system in memory."""
    return str(_service_folder(state) / engine) if MEMORY.is_dir() else ""


@contextmanager
def host_memory(state: Path) -> Iterator[None]:
    """Owns the folder of a service, and removes it at the end, and before that those of services that were killed."""
    if not MEMORY.is_dir():
        yield
        return
    mine = _service_folder(state)
    lock = _lock(mine)
    try:
        for other in MEMORY.glob(f"{_prefix()}*"):
            if other != mine and (taken := _lock(other)) is not None:
                shutil.rmtree(other, ignore_errors=True)
                os.close(taken)
        yield
    finally:
        shutil.rmtree(mine, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """Locks a folder of this user for as long as the result is open. Returns None if another process owns it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    with suppress(OSError):
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
        else:
            return file
    return None
