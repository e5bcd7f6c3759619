"""Opens the files of the prefix cache's tier on a disk, for blocks of exactly this model, dtype, layout and version."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from mini_infer_engine.config.options.settings import EngineSettings, ranks_per_node
from mini_infer_engine.core.kv_tiers.tier_memory import DiskMemory, HostMemory
from mini_infer_engine.core_process.blocks_identity import blocks_identity, is_blocks_identity
from mini_infer_engine.kv_disk.disk_folder import DiskFolder
from mini_infer_engine.kv_disk.disk_store import DiskStore
from mini_infer_engine.kv_disk.failed_disk import FailedDisk, is_fault

log = logging.getLogger(__name__)


SpreadDisk = Callable[[DiskStore, str], DiskMemory]
"""Opens the disks of other ranks beside that of the first one, by the identity of their blocks. Raises OSError if one
cannot be used.
"""


def open_disk(
    settings: EngineSettings, host: HostMemory | None, page_tokens: int, device: str, spread: SpreadDisk
) -> DiskMemory | None:
    """Returns the tier on the disk, and lets the digests of both tiers depend on the identity of its blocks; None if
    there is to be none. A disk that is full or has failed is a tier that is off.

    Raises ValueError if the folder cannot be used or the size is too small.
    """
    if settings.kv_disk_path is None or host is None:
        return None
    identity = host.identity.decode()
    if not is_blocks_identity(identity):
        identity = blocks_identity(settings, identity, page_tokens, host.page_bytes, device)
    path = Path(settings.kv_disk_path).expanduser()
    try:
        folder = DiskFolder(path, identity)
        capacity = settings.kv_disk_size // settings.data_parallel_size // ranks_per_node(settings)
        store = DiskStore(folder, capacity, host.page_bytes, page_tokens, host.page_memory)
        disk = spread(store, identity)
        room_bytes = shutil.disk_usage(folder.path).free + store.used_bytes
    except OSError as error:
        if is_fault(error):
            return FailedDisk(f"--kv-disk-path {path}: {error}")
        raise ValueError(f"--kv-disk-path {path}: {_fault(path, error)}: name a folder that can be written") from error
    host.identity = identity.encode()
    log.info("KV tier on the disk: %s, %.2f GB", folder.path, store.capacity_bytes / 1e9)
    if store.capacity_bytes > room_bytes:
        message = "KV tier on the disk: %s has room for %.2f GB: set a smaller --kv-disk-size: a full disk ends it"
        log.warning(message, folder.path, room_bytes / 1e9)
    return disk


def _fault(path: Path, error: OSError) -> str:
    """Returns what is wrong with a folder that cannot be used."""
    if path.is_symlink() and not path.exists():
        return f"it is a link to {path.readlink()}, which does not exist"
    return f"{error.filename or path}: {error.strerror or error}"
