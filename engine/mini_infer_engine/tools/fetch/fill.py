"""Fills a folder with a model once: copies, hashes, verifies, and publishes the manifest last.

A folder with a manifest is complete. Several processes may fill the same folder: they take turns by a lock on a file in
it, and those that come later find the manifest. A copy that was interrupted goes on with the files that are missing.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mini_infer_engine.tools.fetch.manifest import (
    MANIFEST_NAME,
    FetchError,
    FileRecord,
    Manifest,
    chunks_of,
    differences,
    hash_of,
    read_manifest,
)
from mini_infer_engine.tools.fetch.source_files import Source, SourceFile

_LOCK_NAME = ".mini-infer-lock"
_PARTIAL = ".partial"
_RESERVE_BYTES = 64 << 20
"""Bytes that stay free beside a model."""
Progress = Callable[[int, int | None], None]
"""Gets the bytes that are there, and those of the whole model; None if the source does not say."""


def fill(
    folder: Path, uri: str, source: Source, progress: Progress, make_room: Callable[[int], object] = lambda _: None
) -> Manifest:
    """Fills the folder from the source, unless it is complete already, and returns its manifest.

    `make_room` is called with the bytes that must be free before a copy begins.

    Raises:
        FetchError: the source is not readable, has other contents than it says, or the folder has another model or no
            room.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            return _fill(folder, uri, source, progress, make_room)
    except OSError as error:
        raise FetchError(f"{error.filename or folder}: {error.strerror or error}") from None


def verify(folder: Path, progress: Progress) -> Manifest:
    """Returns the manifest of a folder whose files are as it says.

    Raises:
        FetchError: there is no manifest, or a file differs.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise FetchError(
            f"{folder / MANIFEST_NAME} is missing: the folder was not filled by mini-infer fetch, or not to the end"
        )
    done = 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, manifest.total_bytes)

    if found := differences(folder, manifest, count):
        raise FetchError(f"{folder}: {'; '.join(found[:5])}. Delete the folder, and fetch the model again")
    return manifest


def _fill(folder: Path, uri: str, source: Source, progress: Progress, make_room: Callable[[int], object]) -> Manifest:
    if (manifest := read_manifest(folder)) is not None:
        if manifest.source != uri:
            raise FetchError(f"{folder} has the model of {manifest.source}: name another folder, or delete this one")
        check_sizes(folder, manifest)
        progress(manifest.total_bytes, manifest.total_bytes)
        return manifest
    files = source.files()
    sizes = [file.size for file in files]
    total = None if None in sizes else sum(size for size in sizes if size is not None)
    _check_room(folder, files, make_room)
    done, records = 0, dict[str, FileRecord]()
    for file in files:
        before = done

        def count(num_bytes: int, before: int = before) -> None:
            progress(before + num_bytes, total)

        records[file.name] = _existing(folder, file) or _copy(folder, file, source, count)
        done += records[file.name].size
        progress(done, total)
    manifest = Manifest(uri, records)
    _publish(folder / MANIFEST_NAME, manifest.to_json().encode())
    return manifest


def _existing(folder: Path, file: SourceFile) -> FileRecord | None:
    """Returns the record of a file that an earlier run copied whole: it was renamed to its name only then."""
    target = folder / file.name
    if not target.is_file() or file.size not in (None, target.stat().st_size):
        return None
    record = FileRecord(target.stat().st_size, hash_of(chunks_of(target)))
    return record if file.sha256 in (None, record.sha256) else None


def _copy(folder: Path, file: SourceFile, source: Source, count: Callable[[int], None]) -> FileRecord:
    target = folder / file.name
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + _PARTIAL)
    digest, size = hashlib.sha256(), 0
    try:
        with partial.open("wb") as opened:
            for chunk in source.chunks(file.name):
                opened.write(chunk)
                digest.update(chunk)
                size += len(chunk)
                if file.size is not None and size > file.size:
                    break
                count(size)
            opened.flush()
            os.fsync(opened.fileno())
        record = FileRecord(size, digest.hexdigest())
        if file.size not in (None, size):
            raise FetchError(f"{file.name}: {size:,} bytes came, and {file.size:,} were announced: run it again")
        if file.sha256 not in (None, record.sha256):
            raise FetchError(
                f"{file.name}: what came has SHA-256 {record.sha256}, and the source's manifest says {file.sha256}: "
                "the file was changed or damaged on its way"
            )
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return record


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raises FetchError if a file of a complete folder is missing or has another size, which needs no reading."""
    for name, record in manifest.files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != record.size:
            raise FetchError(f"{file} is not as {MANIFEST_NAME} says: delete the folder, and fetch the model again")


def _check_room(folder: Path, files: list[SourceFile], make_room: Callable[[int], object]) -> None:
    missing = sum(file.size or 0 for file in files if not (folder / file.name).is_file())
    make_room(missing + _RESERVE_BYTES)
    free = shutil.disk_usage(folder).free
    if missing + _RESERVE_BYTES > free:
        raise FetchError(
            f"{folder}: the model needs {missing:,} more bytes, and {free:,} are free: use a larger volume"
        )


def _publish(file: Path, contents: bytes) -> None:
    """Writes a file so that it is either there whole or not at all."""
    partial = file.with_name(file.name + _PARTIAL)
    with partial.open("wb") as opened:
        opened.write(contents)
        opened.flush()
        os.fsync(opened.fileno())
    partial.replace(file)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Waits until no other process fills the folder. The kernel releases the lock of a process that dies."""
    with (folder / _LOCK_NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
