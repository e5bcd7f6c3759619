"""Chooses the memory of the tier below a pool: its kind, its pages, and the form that they have there."""

from collections.abc import Callable

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.kv_host.pool_file import PoolFile
from mini_infer_engine.runtime.memory.cpu_host_tier import CpuHostTier
from mini_infer_engine.runtime.memory.cuda_host_tier import CudaHostTier
from mini_infer_engine.runtime.memory.host_tier import HostTier
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from mini_infer_engine.runtime.memory.page_codec import WORD_BYTES, PageCodec, RawPages, make_codec

OpenSharedPool = Callable[..., PoolFile]
"""Opens memory that several engines share, for pages of so many bytes and a layout of this name. `load_runner` adds the
keywords `page_tokens` and `device`.
"""


def make_host_tier(
    pool: KVPool,
    num_bytes: int,
    identity: bytes,
    dtype: str = "auto",
    open_shared: OpenSharedPool | None = None,
    smallest: Callable[[int], int] = int,
) -> HostTier | None:
    """Returns the tier of a pool with as many pages as fit in `num_bytes`, in the form that `dtype` of
    --kv-tier-dtype says; None if there are to be none. It is in memory that other engines share if `open_shared` opens
    that. `smallest` returns the smallest number of all ranks.

    Raises ModelError if not a single page fits, or no page and state.
    """
    if not num_bytes:
        return None
    codec = make_codec(pool, dtype)
    page_bytes = sum(part.shape[1] for part in codec.parts) * WORD_BYTES
    if num_bytes < page_bytes:
        raise ModelError(f"kv_host_memory = {num_bytes:,} bytes: one page takes {page_bytes:,}: set a larger one.")
    kind = CudaHostTier if pool.storage.device.type == "cuda" else CpuHostTier
    identity += codec.name.encode()
    states = None if pool.states is None or not pool.states.slots.num_checkpoints else pool.states.checkpoint_words()
    pages_per_state = 0 if states is None else -smallest(-pages_of(states.shape[1] * WORD_BYTES, page_bytes))
    least = (1 + pages_per_state) * page_bytes
    if num_bytes < least:
        raise ModelError(
            f"kv_host_memory = {num_bytes:,} bytes: a page and a recurrent state take {least:,}: set a larger one."
        )
    if open_shared is not None:
        shared = open_shared(page_bytes, identity)
        tier: HostTier = kind(codec, shared.layout.num_slots, identity, shared, states, pages_per_state)
    else:
        tier = kind(codec, smallest(num_bytes // page_bytes), identity, None, states, pages_per_state)
    layers = _layers_to_load(pool, codec)
    tier.num_layers = layers if smallest(int(layers > 0)) else 0  # passes follow a load on all ranks or on none
    if len(pool.kv_cache.groups) > 1:
        tier.places = [place for _, place in pool.places]
    return tier


def _layers_to_load(pool: KVPool, codec: PageCodec) -> int:
    """Returns the layers of a pool's pages if each is there once the words of that layer are; otherwise 0.

    Pages of different KV groups have different layers at the same place, as many words each.
    """
    spec, state_group = pool.spec, pool.kv_cache.state_group
    if not isinstance(codec, RawPages) or len(codec.parts) != 1 or state_group is not None or spec.head_shapes:
        return 0
    return 0 if codec.parts[0].shape[1] % spec.num_layers else spec.num_layers


def pages_of(state_bytes: int, page_bytes: int) -> int:
    """Returns the pages of main memory that a state takes."""
    return -(-state_bytes // page_bytes)
