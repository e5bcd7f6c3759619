"""Opens a rank's part of the pool of main memory that engines share and that outlives them, as --kv-host-path says.

The first rank tracks what is in the slots. The parts of others are pages alone, at the same slots.
"""

from collections.abc import Callable

from mini_infer_engine.communication.rank_group import RankGroup
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.kv_host.open_pool import open_part
from mini_infer_engine.kv_host.pool_file import PoolFile
from mini_infer_engine.runtime.memory.page_count import available_memory

Identify = Callable[[str, int, int, str], str]
"""Names exactly the model, dtype and version of an engine's blocks, by the layout of a page, its tokens, its bytes, and
the kind of device.
"""


def open_shared_part(
    settings: EngineSettings,
    page_bytes: int,
    layout: bytes,
    *,
    page_tokens: int,
    device: str,
    group: RankGroup,
    identify: Identify | None = None,
) -> PoolFile:
    """Returns this rank's part. The first rank has `identify` name the blocks; the others get that name from it.

    Raises ValueError if it cannot be used.
    """
    identity = "" if identify is None else identify(layout.decode(), page_tokens, page_bytes, device)
    path, size = settings.kv_host_path or "", group.share_of(settings.kv_host_memory)
    try:
        whole = f"{group.of_first(identity)}, {layout.decode()}"
        return open_part(path, size, page_bytes, page_tokens, whole, available_memory, group.rank, group.smallest)
    except ValueError as error:
        raise ValueError(f"--kv-host-memory: {error}") from error
    except OSError as error:
        raise ValueError(
            f"--kv-host-path {path}: rank {group.rank}: {error.strerror or error}: name a folder in memory, such as "
            f"/dev/shm/NAME, with room for --kv-host-memory ({settings.kv_host_memory:,} bytes)"
        ) from error
