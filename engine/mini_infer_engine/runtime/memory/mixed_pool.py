"""A page pool of layers whose KV heads differ: a `KVPool` of units, and a view of it for the layers of each shape.

A page's memory divides into layers of any of the widths, so that a view is an ordinary pool over the same pages.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mini_infer_engine.config.model.kv_groups import KVCacheConfig, uniform_kv_cache
from mini_infer_engine.config.model.model_config import HeadShape
from mini_infer_engine.core.batch import PageCopy
from mini_infer_engine.models.kv_spec import KVSpec
from mini_infer_engine.runtime.memory.kv_pool import KVPool


class MixedKVPool(KVPool):
    """The pool of all layers. Its own `pages` are units, which nobody reads by token."""

    def __init__(
        self,
        spec: KVSpec,
        num_pages: int,
        device: torch.device,
        num_host_pages: int = 0,
        *,
        is_shared: bool = False,
        kv_cache: KVCacheConfig | None = None,
    ) -> None:
        if kv_cache is None:
            kv_cache = uniform_kv_cache(len(spec.head_shapes), units=spec.layer_units)
        super().__init__(spec, num_pages, device, num_host_pages, is_shared=is_shared, kv_cache=kv_cache)
        places = self.kv_cache.places
        self.views = {
            shape: KVPoolView(
                self, shape, [place for place, own in zip(places, spec.head_shapes, strict=True) if own == shape]
            )
            for shape in dict.fromkeys(spec.head_shapes)
        }
        """The pool of each shape's layers, which have its places in their order."""

    def copied_tokens(self, copy: PageCopy) -> int:
        """Returns all of a page's tokens: those of a layer are not at equal places in all of its units."""
        del copy
        return self.spec.page_size


class KVPoolView(KVPool):
    """The layers of one shape in a `MixedKVPool`, whose memory it shares: for reads and writes of tokens alone."""

    def __init__(self, pool: KVPool, shape: HeadShape, places: list[tuple[int, int]]) -> None:
        self._pool = pool
        super().__init__(pool.spec.of_shape(shape), pool.num_pages, pool.storage.device, kv_cache=pool.kv_cache)
        self.places = tuple(places)

    def _zeros(self, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns the other pool's memory in this pool's shape, instead of new memory."""
        del dtype, device  # those of the pool
        return self._pool.storage.view(sizes)

    def by_layer(self, rows_of_groups: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Returns rows for each layer of this shape."""
        return tuple(rows_of_groups[group][place] for group, place in self.places)
