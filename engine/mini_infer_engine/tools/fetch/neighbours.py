"""Deletes the models on a volume that no service uses any more."""

import re
import shutil
from collections.abc import Collection
from pathlib import Path

from mini_infer_engine.tools.fetch.manifest import FetchError

_MODEL_FOLDER = re.compile(r"[0-9a-f]{16}")
"""Names of folders that the operator gives to models; others on the volume are not touched."""


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
