"""Finds the folder of an engine's segment files: one that no other engine uses, for blocks of this model alone."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

_MOST_ENGINES = 1024
_SEGMENTS = "segment-*.kv"


class DiskFolder:
    """A locked folder, whose lock lasts as long as this process."""

    def __init__(self, path: Path, identity: str) -> None:
        """Takes one of the folders engine-0, engine-1 ... in `path` that no engine uses: the first that has blocks of
        this identity, or else the first of all.

        Segments of another identity are removed there, and in the other folders that no engine uses: a changed model
        never hits, and leaves nothing behind. Raises OSError if the folder cannot be used.
        """
        folders = [path / f"engine-{number}" for number in range(_MOST_ENGINES)]
        known = [folder for folder in folders if _identity(folder) is not None]
        own = [folder for folder in known if _identity(folder) == identity.encode()]
        for folder in (*own, *(folder for folder in folders if folder not in own)):
            folder.mkdir(parents=True, exist_ok=True)
            lock = _lock(folder)
            if lock is not None:
                self.path, self._lock = folder, lock
                break
        else:
            raise OSError(f"{_MOST_ENGINES} engines use it already")
        try:
            if _identity(self.path) != identity.encode():
                _empty(self.path)
                (self.path / "identity").write_bytes(identity.encode())
        except OSError:
            self.release()
            raise
        for folder in known:
            if folder not in own and folder != self.path and (lock := _lock(folder)) is not None:
                _empty(folder)
                os.close(lock)

    def segments(self) -> dict[int, int]:
        """Returns the bytes of the segment files by number. What others have put there and is no file is left alone."""
        files = (file for file in self.path.glob(_SEGMENTS) if file.is_file())
        names = {file.stem.removeprefix("segment-"): file for file in files}
        return {int(name): file.stat().st_size for name, file in names.items() if name.isdecimal()}

    def segment(self, number: int) -> Path:
        """Returns the path of a segment file."""
        return self.path / f"segment-{number:010}.kv"

    def release(self) -> None:
        """Gives the folder back to other engines."""
        os.close(self._lock)


def _lock(folder: Path) -> int | None:
    """Returns a file that locks a folder for as long as it is open, or None if an engine uses the folder."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError:
        os.close(lock)
        raise
    return lock


def _identity(folder: Path) -> bytes | None:
    """Returns what the blocks in a folder are of, or None if that is unknown."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return (folder / "identity").read_bytes()
    return None


def _empty(folder: Path) -> None:
    """Removes all segments of a folder, those of an engine's other ranks included."""
    for segment in folder.rglob(_SEGMENTS):
        if not segment.is_dir():
            segment.unlink()
