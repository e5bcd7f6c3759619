"""Deletes models on a volume: those that no service uses any more, or as many as a new one needs room for."""

import contextlib
import fcntl
import re
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from mini_infer_engine.tools.fetch.manifest import MANIFEST_NAME, FetchError

_MODEL_FOLDER = re.compile(r"[0-9a-f]{16}")
"""Names of folders that the operator gives to models; others on the volume are not touched."""
GRACE_S = 600.0
"""Seconds after a model's last use in which it is not deleted: a pod that has just found it has not locked it yet."""


def prune_neighbours(folder: Path, kept: Collection[str]) -> list[str]:
    """Deletes the models beside `folder` that `kept` does not name. Returns the names of the deleted ones.

    Raises:
        FetchError: a folder cannot be deleted.
    """
    if not folder.parent.is_dir():
        return []
    others = sorted(
        other
        for other in folder.parent.iterdir()
        if _MODEL_FOLDER.fullmatch(other.name) and other.name not in {folder.name, *kept}
    )
    try:
        for other in others:
            shutil.rmtree(other)
    except OSError as error:
        raise FetchError(f"{error.filename}: {error.strerror}") from None
    return [other.name for other in others]


def make_room(folder: Path, num_bytes: int) -> list[str]:
    """Deletes models beside `folder`, the least recently used first, until so many bytes are free.

    An engine that reads a model has a shared lock on its manifest, and a pod that starts updates the manifest's time.
    So models that are read, or were used within GRACE_S, stay, as do folders without a manifest, which are being
    filled. Returns the names of the deleted ones.

    Raises:
        FetchError: a folder cannot be deleted.
    """
    deleted: list[str] = []
    others = [f for f in folder.parent.iterdir() if _MODEL_FOLDER.fullmatch(f.name) and f.name != folder.name]
    for other in sorted((f for f in others if (f / MANIFEST_NAME).is_file()), key=_used_s):
        if shutil.disk_usage(folder).free >= num_bytes:
            break
        if time.time() - _used_s(other) >= GRACE_S and _delete_unused(other):
            deleted.append(other.name)
    return deleted


def touch(folder: Path) -> None:
    """Records that the model of a complete folder is used. Another user's model keeps its time."""
    with contextlib.suppress(PermissionError):
        (folder / MANIFEST_NAME).touch()


def _used_s(folder: Path) -> float:
    return (folder / MANIFEST_NAME).stat().st_mtime


def _delete_unused(folder: Path) -> bool:
    """Deletes a model unless an engine reads it. Returns False in that case."""
    try:
        with (folder / MANIFEST_NAME).open("rb") as manifest:
            try:
                fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            shutil.rmtree(folder)
    except OSError as error:
        raise FetchError(f"{error.filename}: {error.strerror}") from None
    return True
