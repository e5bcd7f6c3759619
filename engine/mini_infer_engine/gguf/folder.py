"""Makes a model folder for a GGUF file: writes its small files once into a cache, with a pointer to the weights.

All readers of a model folder (config, tokenizer, chat template, prompt assets) therefore work unchanged. Several
processes may do this at once. No torch.
"""

import getpass
import hashlib
import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.gguf.architectures import model_config
from mini_infer_engine.gguf.header import GgufHeader
from mini_infer_engine.gguf.tokenizer import tokenizer_files
from mini_infer_engine.gguf.translation import FACTORS_TENSORS

POINTER = "gguf.json"
"""The file in a folder that names the GGUF file with its weights."""
_FORM = 4
"""The version of the folder's content; a new number makes new folders."""


def is_gguf(path: Path) -> bool:
    """True if the name is that of a GGUF file, in small letters or capitals; the file need not exist."""
    return path.suffix.lower() == ".gguf"


def gguf_files(directory: Path) -> list[Path]:
    """Returns the GGUF files of a folder, sorted; none if there is no such folder."""
    return sorted(path for path in directory.glob("*") if is_gguf(path))


def model_folder(path: Path) -> Path:
    """Returns the folder of a GGUF file, made anew if the file has changed.

    Raises:
        ModelError: the file cannot be read, or its content is not supported.
    """
    path = path.resolve()
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error}).") from None
    identity = repr((_FORM, str(path), status.st_size, status.st_mtime_ns))
    name = f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    for root in cache_roots("gguf"):
        if (root / name / POINTER).is_file():
            return root / name
    files = folder_files(GgufHeader.read(path))
    for root in cache_roots("gguf"):
        try:
            return write_folder(root, name, files, {}, POINTER)
        except OSError:
            continue  # a read-only home: the next root
    raise ModelError(f"{path}: there is no folder to write its config and tokenizer to: set XDG_CACHE_HOME to one.")


def folder_files(header: GgufHeader) -> dict[str, Any]:
    """Returns the folder's files by name, as objects. Raises ModelError if the GGUF file's content is not supported."""
    tensors = header.tensors
    return {
        "config.json": model_config(
            header, {name: _factors(header, name) for name in FACTORS_TENSORS if name in tensors}
        ),
        **tokenizer_files(header),
        POINTER: {"file": str(header.path)},
    }


def weights_file(directory: Path) -> Path | None:
    """Returns the GGUF file that a folder names, or None for an ordinary folder."""
    pointer = directory / POINTER
    return Path(json.loads(pointer.read_text("utf-8"))["file"]) if pointer.is_file() else None


def _factors(header: GgufHeader, name: str) -> list[float]:
    tensor = header.tensors[name]
    if tensor.encoding != "F32":
        raise ModelError(f"{header.path}: tensor {tensor.name} is of type {tensor.encoding}, and must be F32.")
    with header.path.open("rb") as file:
        file.seek(tensor.begin)
        factors = list(struct.unpack(f"<{tensor.size // 4}f", file.read(tensor.size)))
    if (broken := next((factor for factor in factors if not 0 < factor < math.inf), None)) is not None:
        raise ModelError(
            f"{header.path}: tensor {tensor.name} has {broken:g}, and must have finite numbers above 0, which divide "
            "frequencies: convert the model again."
        )
    return factors


def cache_roots(kind: str) -> list[Path]:
    """Returns the places for folders of a kind: the user's cache folder, then the user's folder for temporary files."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return [cache / "mini-infer" / kind, Path(tempfile.gettempdir()) / f"mini-infer-{_user()}" / kind]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())


def write_folder(root: Path, name: str, files: Mapping[str, Any], links: Mapping[str, Path], last: str) -> Path:
    """Writes JSON files, and links to others, whole or not at all: another process may be writing the same.

    `last` is a file that every such folder has. Raises OSError if the folder cannot be written.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=root))
    try:
        for file_name, content in files.items():
            (made / file_name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        for file_name, target in links.items():
            (made / file_name).symlink_to(target)
        made.rename(root / name)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        if not (root / name / last).is_file():
            raise
    return root / name
