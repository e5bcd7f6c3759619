"""Computes a digest of a checkpoint's content: two engines may share keys and values only if their digests are equal.

Reading tens of gigabytes takes a while. A file's digest is therefore cached beside it, or in the user's cache if the
folder is read-only, and is valid until the file's size or one of its times changes. The time of modification alone
would not do: archives and images that are made reproducibly give all files the same.
"""

import contextlib
import hashlib
import json
import logging
import os
import secrets
from pathlib import Path
from typing import Any

from mini_infer_engine.gguf.folder import weights_file

log = logging.getLogger(__name__)

_KEPT_AS = ".mini-infer-digests.json"
_WEIGHTS = ("*.safetensors", "config.json")


def checkpoint_digest(folder: Path) -> str:
    """Returns the digest of all weights and the config in a model's folder. File names and the folder's path do not
    count.

    The weights of a GGUF model are in the file that its folder names.
    """
    files = sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern)}, key=lambda path: path.name)
    if (gguf := weights_file(folder)) is not None:
        files.append(gguf)
    digests = sorted(_digest_of(path) for path in files)
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _digest_of(path: Path) -> str:
    status = path.stat()
    mark = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    places = [path.parent / _KEPT_AS, _in_cache(path.parent)]
    for place in places:
        kept = _read(place).get(path.name)
        if isinstance(kept, dict) and kept.get("mark") == mark:
            return str(kept["sha256"])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    for place in places:
        if _write(place, path.name, {"mark": mark, "sha256": digest}):
            break
    return digest


def _in_cache(folder: Path) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return cache / "mini-infer" / "digests" / f"{name}.json"


def _read(place: Path) -> dict[str, Any]:
    try:
        kept = json.loads(place.read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _write(place: Path, name: str, entry: dict[str, Any]) -> bool:
    """Adds an entry to a cache file, which is replaced atomically: two engines may start at once. Returns False if the
    file cannot be written.
    """
    new = place.with_name(f"{place.name}.{secrets.token_hex(4)}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(_read(place) | {name: entry}))
        new.replace(place)
    except OSError as error:
        log.debug("digests are not kept in %s: %s", place.parent, error)
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        return False
    return True
