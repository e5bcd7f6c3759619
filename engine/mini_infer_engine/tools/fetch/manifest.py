"""Reads and writes the manifest of a model's folder: its source, and each file's size and SHA-256. Copies nothing."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mini_infer_contract.launch import MODEL_MANIFEST

MANIFEST_NAME = MODEL_MANIFEST
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 8 << 20
_MOST_FILES = 10_000


class FetchError(Exception):
    """Raised if a model cannot be fetched or is not what its manifest says; the message names file and remedy."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of the model as the manifest describes it."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """All files of a folder, by their paths in it."""

    source: str
    files: Mapping[str, FileRecord]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(record.size for record in self.files.values())

    def to_json(self) -> str:
        """Returns the manifest's text."""
        files = {name: asdict(record) for name, record in sorted(self.files.items())}
        return json.dumps({"source": self.source, "files": files}, indent=2) + "\n"


def parse_manifest(text: str, where: str) -> Manifest:
    """Parses a manifest's text, which came from `where`.

    Raises:
        FetchError: the text is no manifest, or names a file outside its folder.
    """
    try:
        found: Any = json.loads(text)
        files = {
            checked_name(name, where): FileRecord(_checked_size(record["size"]), _checked_hash(record["sha256"]))
            for name, record in found["files"].items()
        }
        source = found["source"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FetchError(f"{where} is no manifest of mini-infer ({error}): delete it, or name another source") from None
    if not files or len(files) > _MOST_FILES or not isinstance(source, str):
        raise FetchError(f"{where} names {len(files)} files: a model has 1 to {_MOST_FILES:,}")
    return Manifest(source, files)


def read_manifest(folder: Path) -> Manifest | None:
    """Returns the manifest of a folder; None if it has none. Raises FetchError if it cannot be read."""
    file = folder / MANIFEST_NAME
    try:
        return parse_manifest(file.read_text("utf-8"), str(file))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise FetchError(f"{file}: {error}") from None


def checked_name(name: object, where: str) -> str:
    """Returns the path of a file in a folder. Raises FetchError if it leaves the folder: the name is a peer's."""
    if isinstance(name, str) and name.isprintable():
        path = PurePosixPath(name)
        is_inside = bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\\" not in name
        if is_inside and len(name) <= 512 and path.parts[-1] != MANIFEST_NAME:
            return str(path)
    raise FetchError(f"{where} names the file {name!r}, which is no path inside its folder")


def differences(folder: Path, manifest: Manifest, progress: Callable[[int], None] = lambda count: None) -> list[str]:
    """Returns a sentence for each file of the folder that is not what the manifest says, by size and then by hash.

    `progress` gets the numbers of bytes that are read.
    """
    found = []
    for name, record in manifest.files.items():
        file = folder / name
        try:
            size = file.stat().st_size
            if size != record.size:
                found.append(f"{name} has {size:,} bytes, not {record.size:,}")
            elif (sha256 := hash_of(chunks_of(file, progress))) != record.sha256:
                found.append(f"{name} has SHA-256 {sha256}, not {record.sha256}")
        except OSError as error:
            found.append(f"{name} cannot be read: {error.strerror or error}")
    return found


def chunks_of(file: Path, progress: Callable[[int], None] = lambda count: None) -> Iterator[bytes]:
    """Yields a file's contents. `progress` gets the number of bytes of each piece."""
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            progress(len(chunk))
            yield chunk


def hash_of(chunks: Iterable[bytes]) -> str:
    """Returns the SHA-256 of the chunks, one after the other, in hexadecimal."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def _checked_size(size: object) -> int:
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    raise ValueError(f"size {size!r}")


def _checked_hash(sha256: object) -> str:
    if isinstance(sha256, str) and _SHA256.fullmatch(sha256):
        return sha256
    raise ValueError(f"sha256 {sha256!r}")
