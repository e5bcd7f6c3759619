"""Measures how fast a model's files can be read, by a sample of them. It returns no content. No torch here."""

import os
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mini_infer_engine.gguf.folder import weights_file

_SAMPLES = 8
_SAMPLE_BYTES = 4 << 20
_CACHE_SAMPLES = 64
"""Bytes that are looked up in the page cache: of files of which a tenth is missing, one in a thousand passes."""
_LEAST_BYTES = 16 << 20
"""Files with fewer bytes are read too soon to be measured: they count as fast."""


def weight_files(directory: Path) -> list[Path]:
    """Returns the files that have the model's weights."""
    gguf = weights_file(directory)
    return [gguf] if gguf is not None else sorted(directory.glob("*.safetensors"))


def file_bytes_per_s(files: Sequence[Path]) -> float | None:
    """Returns the bytes per second of random parts of the files, read by several threads as the loader does.

    Small files count as infinitely fast. Returns None if a file cannot be read.
    """
    try:
        sizes = {file: file.stat().st_size for file in files}
        if sum(sizes.values()) < _LEAST_BYTES:
            return float("inf")
        largest = [file for file in files if sizes[file] >= _SAMPLE_BYTES] or [max(files, key=lambda file: sizes[file])]
        chosen = [largest[number % len(largest)] for number in range(_SAMPLES)]
        begin_s = time.monotonic()
        with ThreadPoolExecutor(_SAMPLES) as pool:
            num_bytes = sum(pool.map(_read_sample, chosen, [sizes[file] for file in chosen]))
        return num_bytes / max(time.monotonic() - begin_s, 1e-6)
    except OSError:
        return None


def are_cached(files: Sequence[Path]) -> bool:
    """Returns True if random parts of the files all are in the page cache; False if the system does not say."""
    largest = sorted(files, key=lambda file: file.stat().st_size)[-_SAMPLES:]
    return all(_is_cached(largest[number % len(largest)]) for number in range(_CACHE_SAMPLES)) if largest else False


def _is_cached(file: Path) -> bool:
    """Returns True if a random byte of a file is in the page cache."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    descriptor = os.open(file, os.O_RDONLY)
    try:
        offset = secrets.randbelow(max(1, os.fstat(descriptor).st_size))
        os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
    except OSError:  # it would wait for the disk, or its file system cannot tell
        return False
    finally:
        os.close(descriptor)
    return True


def _read_sample(file: Path, size: int) -> int:
    offset = secrets.randbelow(max(1, size - _SAMPLE_BYTES))
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return len(os.pread(descriptor, _SAMPLE_BYTES, offset))
    finally:
        os.close(descriptor)
