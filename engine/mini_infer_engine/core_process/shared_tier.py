"""Opens the pool of main memory that engines share and that outlives them, as --kv-host-path says."""

import logging
from pathlib import Path

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core_process.blocks_identity import blocks_identity
from mini_infer_engine.kv_host.open_pool import is_anonymous, is_in_memory, open_pool
from mini_infer_engine.kv_host.pool_file import PoolFile
from mini_infer_engine.runtime.memory.page_count import available_memory

log = logging.getLogger(__name__)


def open_shared_tier(
    settings: EngineSettings, page_bytes: int, layout: bytes, *, page_tokens: int, device: str
) -> PoolFile:
    """Returns the pool in the folder of the settings. Raises ValueError if it cannot be used."""
    path, size = settings.kv_host_path or "", settings.kv_host_memory
    with_weights = not is_anonymous(path)
    identity = blocks_identity(settings, layout.decode(), page_tokens, page_bytes, device, with_weights=with_weights)
    try:
        file = open_pool(path, size, page_bytes, page_tokens, identity, available_memory)
    except ValueError as error:
        raise ValueError(f"--kv-host-memory: {error}") from error
    except OSError as error:
        raise ValueError(
            f"--kv-host-path {path}: {error.strerror or error}: name a folder in memory, such as /dev/shm/NAME, with "
            f"room for --kv-host-memory ({size:,} bytes)"
        ) from error
    if with_weights and not is_in_memory(file.path.resolve(), _mounts()):
        log.warning("--kv-host-path %s is on a disk, to which all blocks are written: name a folder in /dev/shm", path)
    if file.layout.file_bytes > size:
        log.warning(
            "KV tier in main memory: other engines use %s with %.2f GB", file.path, file.layout.file_bytes / 1e9
        )
    log.info("KV tier in main memory: %s, %d pages of %d bytes", file.path, file.layout.num_slots, page_bytes)
    return file


def _mounts() -> str:
    try:
        return Path("/proc/mounts").read_text()
    except OSError:
        return ""
