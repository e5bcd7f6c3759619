"""Reads a model's files into the page cache while the process imports torch and opens the GPU.

It only reads: the loader finds the bytes in the page cache, or reads them itself. No torch here.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.model_path import resolve_model
from mini_infer_engine.weight_transfer.addresses import resolved_peers
from mini_infer_engine.weight_transfer.decisions import FAST_FILES_BYTES_PER_S
from mini_infer_engine.weight_transfer.file_rate import are_cached, file_bytes_per_s, weight_files
from mini_infer_process.interpreter import lower_thread_priority

log = logging.getLogger(__name__)

_THREADS = 4
_CHUNK_BYTES = 4 << 20


class Prefetch:
    """Threads that read files once, in the order in which the loader does."""

    def __init__(self, find: Callable[[], Sequence[Path]], threads: int = _THREADS) -> None:
        """Begins to find files and to read them, without waiting for either."""
        self._find, self._num_threads = find, threads
        self._lock = threading.Lock()
        self._stopping = False
        self.num_bytes = 0
        """Bytes that were read."""
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits until all files have been read."""
        self._thread.join()

    def stop(self) -> None:
        """Ends the threads, each after its current chunk."""
        self._stopping = True

    def _run(self) -> None:
        lower_thread_priority()
        files = self._find()
        parts = iter([(file, begin) for file in files for begin in range(0, _size(file), _CHUNK_BYTES)])
        readers = [threading.Thread(target=self._read, args=(parts,), daemon=True) for _ in range(self._num_threads)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()

    def _read(self, parts: Iterator[tuple[Path, int]]) -> None:
        lower_thread_priority()
        buffer = bytearray(_CHUNK_BYTES)
        with contextlib.suppress(OSError):  # the loader reports files that cannot be read
            while not self._stopping:
                with self._lock:
                    part = next(parts, None)
                if part is None:
                    return
                file, begin = part
                descriptor = os.open(file, os.O_RDONLY)
                try:
                    count = os.preadv(descriptor, [buffer], begin)
                finally:
                    os.close(descriptor)
                with self._lock:
                    self.num_bytes += count


def begin_prefetch(settings: EngineSettings, peers: Sequence[str]) -> Prefetch:
    """Begins to read an engine's weights, if they are on a disk and no peer may send them.

    `peers` are the addresses of engines that may.
    """
    return Prefetch(partial(slow_files, settings, peers))


def slow_files(settings: EngineSettings, peers: Sequence[str]) -> list[Path]:
    """Returns the files of the weights that are worth reading ahead.

    Those in the page cache would only be copied once more.
    """
    if settings.load_format == "dummy" or (settings.weights_from != "files" and resolved_peers(peers, 1)):
        return []
    try:
        files = weight_files(resolve_model(settings.model, settings.revision))
        if are_cached(files):
            return []
        rate = file_bytes_per_s(files)
    except (ValueError, OSError):
        return []  # the loader reports it
    if rate is None or rate >= FAST_FILES_BYTES_PER_S:
        return []
    log.info("weights: files are read at %.1f GB/s, and prefetched into the page cache", rate / 1e9)
    return files


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
