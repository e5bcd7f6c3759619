"""Reads a model's files into the page cache while the process imports torch and opens the GPU.

It only reads: the loader finds the bytes in the page cache, or reads them itself. No torch here.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.model_path import resolve_model
from mini_infer_engine.weight_transfer.decisions import FAST_FILES_BYTES_PER_S
from mini_infer_engine.weight_transfer.file_rate import file_bytes_per_s, weight_files

log = logging.getLogger(__name__)

_THREADS = 4
_CHUNK_BYTES = 4 << 20
_NICE = 10


class Prefetch:
    """Threads that read files once, in the order in which the loader does."""

    def __init__(self, files: Sequence[Path], threads: int = _THREADS) -> None:
        """Begins to read."""
        self._parts = iter([(file, begin) for file in files for begin in range(0, _size(file), _CHUNK_BYTES)])
        self._lock = threading.Lock()
        self._stopping = False
        self.num_bytes = 0
        """Bytes that were read."""
        self._threads = [threading.Thread(target=self._run, name="prefetch", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Waits until all files have been read."""
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """Ends the threads, each after its current chunk."""
        self._stopping = True

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # a platform without priorities of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        buffer = bytearray(_CHUNK_BYTES)
        with contextlib.suppress(OSError):  # the loader reports files that cannot be read
            while not self._stopping:
                with self._lock:
                    part = next(self._parts, None)
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


def begin_prefetch(settings: EngineSettings, *, has_peers: bool) -> Prefetch | None:
    """Begins to read the files of an engine's weights, if they are on a disk and no peer may send the weights.

    Files in the page cache would only be copied once more.
    """
    if settings.load_format == "dummy" or (has_peers and settings.weights_from != "files"):
        return None
    try:
        files = weight_files(resolve_model(settings.model, settings.revision))
        rate = file_bytes_per_s(files)
    except (ValueError, OSError):
        return None  # the loader reports it
    if rate is None or rate >= FAST_FILES_BYTES_PER_S:
        return None
    log.info("weights: files are read at %.1f GB/s, and prefetched into the page cache", rate / 1e9)
    return Prefetch(files)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
