"""Finds the folder of an engine's segment files: one that no other engine uses, for blocks of this model alone."""

import fcntl
import os
from pathlib import Path

_MOST_ENGINES = 1024


class DiskFolder:
    """A locked folder, whose lock lasts as long as this process."""

    def __init__(self, path: Path, identity: str) -> None:
        """Takes the first of the folders engine-0, engine-1 ... in `path` that is not in use.

        Segments of another identity are removed: a changed model never hits. Raises OSError if it cannot be used.
        """
        for number in range(_MOST_ENGINES):
            self.path = path / f"engine-{number}"
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                os.close(self._lock)
        else:
            raise OSError(f"{path}: {_MOST_ENGINES} engines use it already")
        known = self.path / "identity"
        if not known.exists() or known.read_text() != identity:
            for segment in self.segments():
                self.segment(segment).unlink()
            known.write_text(identity)

    def segments(self) -> list[int]:
        """Returns the numbers of the segment files."""
        names = (file.stem.removeprefix("segment-") for file in self.path.glob("segment-*.kv"))
        return sorted(int(name) for name in names if name.isdecimal())

    def segment(self, number: int) -> Path:
        """Returns the path of a segment file."""
        return self.path / f"segment-{number:010}.kv"

    def release(self) -> None:
        """Gives the folder back to other engines."""
        os.close(self._lock)
