"""A page pool whose keys and values have one byte an element: a `KVPool` with scales after the values.

A layer's part of a page has its tokens [page_size, kv_heads, head_dim] and their scales [kv_heads, page_size], so that
a kernel reads those of one head at once. A page is still one piece of memory: swapping and sending it know no scales.
"""

import torch
from torch import Tensor

from mini_infer_engine.config.model.kv_groups import KVCacheConfig
from mini_infer_engine.core.batch import PageCopy
from mini_infer_engine.models.kv_spec import SCALE_DTYPE, KVQuantization, KVSpec
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from mini_infer_engine.runtime.memory.kv_rows import dequantize_rows, quantize_rows
from mini_infer_engine.runtime.memory.mixed_pool import MixedKVPool


class QuantizedKVPool(KVPool):
    """A `KVPool` that quantises its contents. Backends in plain torch see values in the model's dtype."""

    def _allocate(self, num_halves: int, device: torch.device) -> Tensor:
        spec = self.spec
        assert spec.quantization is not None, "a plain KVPool"
        self._kind: KVQuantization = spec.quantization
        half_pages = self._zeros((num_halves, spec.half_bytes), torch.uint8, device)
        self._value_bytes = spec.page_size * spec.row_width
        # Of each half page [page_size, kv_heads, head_dim], as bytes, for indexing knows no 8-bit floats, and
        # [kv_heads, page_size].
        self._values, self._scales = self._split(half_pages)
        halves = (-1, spec.num_layers, spec.entries)
        self.pages = self._values.view(self._kind.dtype).view(*halves, *self._values.shape[1:])
        # [pages, layers, keys or values, kv_heads, page_size]
        self.scales = self._scales.view(*halves, *self._scales.shape[1:])
        return half_pages

    def _split(self, half_pages: Tensor) -> tuple[Tensor, Tensor]:
        """Splits half pages [halves, half_bytes] into bytes [halves, page_size, kv_heads, head_dim] and scales [halves,
        kv_heads, page_size].
        """
        heads, tokens = self.spec.num_kv_heads, self.spec.page_size
        values = half_pages[:, : self._value_bytes].view(-1, tokens, heads, self.spec.head_dim)
        return values, half_pages[:, self._value_bytes :].view(SCALE_DTYPE).view(-1, heads, tokens)

    def copy(self, copies: list[PageCopy]) -> None:
        """Queues copies on the device of values and scales, one after the other."""
        super().copy(copies)
        for copy in copies:
            self.scales[copy.target, ..., : copy.tokens].copy_(self.scales[copy.source, ..., : copy.tokens])

    def read_keys(self, layer: int, pages: Tensor) -> Tensor:
        """Returns the dequantised keys of a layer in these pages, [tokens, kv_heads, head_dim]."""
        place = self.places[layer][1]
        values = self.pages.view(torch.uint8)[:, place, 0][pages].view(self._kind.dtype)
        scales = self.scales[:, place, 0][pages].transpose(1, 2)
        return dequantize_rows(values, scales, self.spec.dtype).flatten(0, 1)

    def _contents(self) -> list[tuple[Tensor, bool]]:
        return [(self.pages.view(torch.uint8), False), (self.scales, True)]

    def write(self, rows: Tensor, new: Tensor) -> Tensor:
        """Quantises keys and values [tokens, 2, kv_heads, head_dim] and writes them to `rows`. Returns the rounded
        values.
        """
        values, scales = quantize_rows(new, self._kind)
        halves, offsets = rows // self.spec.page_size, rows % self.spec.page_size
        self._values[halves, offsets] = values.view(torch.uint8).flatten(0, 1)
        self._scales[halves, :, offsets] = scales.flatten(0, 1)
        return dequantize_rows(values, scales, new.dtype)

    def read(self, rows: Tensor, out: Tensor) -> Tensor:
        """Reads and dequantises the tokens of these rows into `out` [rows, row_width]."""
        halves, offsets = rows // self.spec.page_size, rows % self.spec.page_size
        values = self._values[halves, offsets].view(self._kind.dtype)
        return out.copy_(dequantize_rows(values, self._scales[halves, :, offsets], out.dtype).flatten(1))

    def _gathered(self, rows: Tensor) -> Tensor:
        values, scales = self._split(super()._gathered(rows))
        return dequantize_rows(values.view(self._kind.dtype), scales.transpose(1, 2), self.spec.dtype)


def make_pool(
    spec: KVSpec,
    num_pages: int,
    device: torch.device,
    num_host_pages: int = 0,
    *,
    is_shared: bool = False,
    kv_cache: KVCacheConfig | None = None,
) -> KVPool:
    """Returns a pool that stores keys and values as the spec says, for these KV groups."""
    kind = MixedKVPool if spec.head_shapes else KVPool if spec.quantization is None else QuantizedKVPool
    return kind(spec, num_pages, device, num_host_pages, is_shared=is_shared, kv_cache=kv_cache)
