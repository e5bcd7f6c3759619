"""Stores keys and values of every layer, or latents, in pages. It knows addresses, not sequences.

All layers of a page lie together so that a page is one piece to copy, swap or send; a layer is read through strides.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from mini_infer_engine.config.model.kv_groups import KVCacheConfig, uniform_kv_cache
from mini_infer_engine.core.batch import PageCopy, PageSwap, Transfers
from mini_infer_engine.kv_transfer.layout import KVLayout, KVMemory
from mini_infer_engine.models.kv_spec import SCALE_DTYPE, KVSpec
from mini_infer_engine.runtime.memory.cache_memory import cache_memory
from mini_infer_engine.runtime.memory.hidden_pages import HiddenPages
from mini_infer_engine.runtime.memory.key_bounds import KeyBounds
from mini_infer_engine.runtime.memory.page_swaps import swap_rows
from mini_infer_engine.runtime.memory.state_pool import StatePool
from mini_infer_engine.runtime.memory.swap_digests import SwapCheck, SwapDigests

_MOST_COPIED_BYTES = 64 << 20
"""Bytes that a compaction copies at a time: it needs so much memory beside the pool."""


class KVPool:
    """A pool of `num_pages` pages for the scheduler, and `null_page`, which pads page tables and is never written."""

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
        """Allocates the pages. With `is_shared`, other processes can map them if they are in main memory.

        `kv_cache` has the KV groups that share the pool; None means one group of all layers.
        """
        self.spec = spec
        self.kv_cache = uniform_kv_cache(spec.num_layers) if kv_cache is None else kv_cache
        self.places = self.kv_cache.places
        """The KV group of each layer, and the layer's index in the group's pages."""
        self.states: StatePool | None = None
        """The recurrent state of sequences, beside the pages; None if no layer has one."""
        self.hidden: HiddenPages | None = None
        """The hidden states that a draft reads, under the ids of the pages; None if no draft reads any."""
        self.bounds: KeyBounds | None = None
        """The bounds of each page's keys, under the ids of the pages; None if decodes attend to all pages."""
        self.attention_sums: Tensor | None = None
        """Attention that each token has got so far, [pages + 1, layers, 1, kv_heads, page_size] fp32; None if it is not
        counted.
        """
        self._is_shared = is_shared
        self._file: int | None = None
        self.num_pages = num_pages
        self.null_page = num_pages
        self.half_pages = self._allocate((num_pages + 1) * spec.num_layers * spec.entries, device)
        """Parts of pages, all of equal size: one layer's keys, values, or latents."""
        self.storage = self.half_pages.view(num_pages + 1, -1)
        """Whole pages."""
        # In main memory, pinned for a GPU, for pages of preempted sequences.
        sizes, on_gpu = (num_host_pages, self.storage.shape[1]), device.type == "cuda"
        self.host_pages = torch.empty(sizes, dtype=self.storage.dtype, pin_memory=on_gpu)
        self.swap_check: SwapCheck | None = None
        """The proof of what the latest transfers have brought back from main memory; None if that was nothing."""
        self._scratch = self.half_pages[:0]
        # Keys, values of each layer.
        self._halves = torch.arange(spec.num_layers * spec.entries, device=device).view(-1, 1, spec.entries)

    def _allocate(self, num_halves: int, device: torch.device) -> Tensor:
        """Allocates memory [num_halves, elements], and creates views of it."""
        spec = self.spec
        half_pages = self._zeros((num_halves, spec.page_size * spec.row_width), spec.dtype, device)
        self.tokens = half_pages.view(-1, spec.row_width)
        sizes = (spec.num_layers, spec.entries, spec.page_size, spec.num_kv_heads, spec.head_dim)
        # [pages, layers, keys or values (or one latent), page_size, kv_heads, head_dim]
        self.pages = half_pages.view(-1, *sizes)
        return half_pages

    def _zeros(self, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        memory, self._file = cache_memory(sizes, dtype, device, is_shared=self._is_shared)
        return memory

    def memory(self) -> KVMemory:
        """Returns the address and layout of the pool and of the recurrent states beside it, for KV transfer."""
        spec, device = self.spec, self.pages.device
        states = None if self.states is None else self.states.memory()
        layout = KVLayout(
            num_layers=spec.num_layers,
            halves=spec.entries,
            page_size=spec.page_size,
            num_heads=spec.num_kv_heads,
            head_bytes=spec.head_dim * spec.storage_dtype.itemsize,
            scale_bytes=0 if spec.quantization is None else SCALE_DTYPE.itemsize,
            dtype=str(spec.storage_dtype).removeprefix("torch."),
            states=None if states is None else states.layout,
        )
        return KVMemory(
            address=self.storage.data_ptr(),
            num_pages=self.num_pages,
            device="cuda" if device.type == "cuda" else "cpu",
            device_index=device.index or 0,
            layout=layout,
            file=self._file,
            states=states,
        )

    def transfer(self, transfers: Transfers) -> None:
        """Queues the copies that a pass needs, in the order that `Transfers` says; a copy's target may be a later
        source.
        """
        self.swap(transfers)
        self.copy(transfers.copies)

    def swap(self, transfers: Transfers) -> None:
        """Queues copies to main memory and from there, and the digests that prove them. What leaves is read before
        what comes back takes its place.
        """
        self.swap_check = None
        if not transfers.has_swaps:
            return
        self._move(leaving := Transfers(swap_out=transfers.swap_out, states_out=transfers.states_out))
        self._record(leaving)
        self._move(returning := Transfers(swap_in=transfers.swap_in, states_in=transfers.states_in))
        self.swap_check = self._check(returning)

    def _move(self, transfers: Transfers) -> None:
        """Queues the copies of `swap`."""
        if self.states is not None:
            self.states.swap(transfers)
        swap_rows(self.storage, self.host_pages, transfers)
        for beside in self._beside:
            beside.swap(transfers)

    def identity(self) -> bytes:
        """Names the content of a page: equal bytes mean the same in two pools with equal names."""
        forms: list[object] = [self.memory().layout]
        forms += [] if self.states is None else [self.states.memory().layout]
        forms += [] if self.kv_cache.is_uniform else [self.kv_cache.groups]
        forms += [] if self.bounds is None else [self.bounds.form]
        return repr(forms if len(forms) > 1 else forms[0]).encode()

    def words(self) -> list[Tensor]:
        """Returns all memory of the pages as words [pages, words] int64: keys and values, then hidden states if a draft
        reads any, and bounds of the keys if decodes select pages.
        """
        parts = [self.storage, *(beside.pages.flatten(1) for beside in self._beside if beside.pages.numel())]
        return [part.view(torch.int64) for part in parts]

    @cached_property
    def _swap_digests(self) -> SwapDigests:
        """The digests of pages in main memory. All parts of a page must be there."""
        return SwapDigests(self.words(), len(self.host_pages))

    def prepare_swap(self) -> None:
        """Compiles on a GPU what swapping needs, once all parts of a page are there."""
        if len(self.host_pages):
            self._swap_digests.prepare()
        if self.states is not None:
            self.states.prepare_swap()

    def _record(self, leaving: Transfers) -> None:
        """Makes digests of what has left."""
        if leaving.swap_out:
            self._swap_digests.left(*_both_sides(leaving.swap_out))
        if self.states is not None and leaving.states_out:
            self.states.record(leaving)

    def _check(self, returning: Transfers) -> SwapCheck | None:
        """Compares what has come back with what left."""
        found: list[Tensor] = []
        if returning.swap_in:
            found.append(self._swap_digests.returned(*_both_sides(returning.swap_in)))
        if self.states is not None and returning.states_in:
            found.append(self.states.check(returning))
        return SwapCheck(found) if found else None

    def copy(self, copies: list[PageCopy]) -> None:
        """Queues copies on the device, one after the other."""
        for copy in copies:
            tokens = self.copied_tokens(copy)
            self.pages[copy.target, :, :, :tokens].copy_(self.pages[copy.source, :, :, :tokens])
        for beside in self._beside:
            beside.copy(copies)

    @property
    def _beside(self) -> list[HiddenPages | KeyBounds]:
        """The tensors that lie beside the pages under their ids, and are copied with them."""
        return [beside for beside in (self.hidden, self.bounds) if beside is not None]

    def read_keys(self, layer: int, pages: Tensor) -> Tensor:
        """Returns a layer's keys in pages [pages] int64: [tokens, kv_heads, head_dim] in the model's dtype."""
        return self.pages[:, self.places[layer][1], 0][pages].flatten(0, 1)

    def read_sums(self, pages: Tensor) -> Tensor:
        """Returns the sums of attention in these pages [pages] int64: [layers, kv_heads, tokens] fp32."""
        assert self.attention_sums is not None, "attention is not counted"
        return self.attention_sums[pages].squeeze(2).permute(1, 2, 0, 3).flatten(2)

    def add_sums(self, layer: int, pages: Tensor, sums: Tensor, num_before: int) -> None:
        """Adds sums [kv_heads, tokens] to those of a layer's tokens in these pages, the first `num_before` of which
        have some already.
        """
        assert self.attention_sums is not None, "attention is not counted"
        of_layer = self.attention_sums[:, self.places[layer][1], 0]
        stored = of_layer[pages]  # [pages, kv_heads, page_size]
        padded = stored.new_zeros((sums.shape[0], stored.shape[0] * stored.shape[2]))
        padded[:, : sums.shape[1]] = sums
        padded[:, :num_before] += stored.transpose(0, 1).flatten(1)[:, :num_before]
        of_layer[pages] = padded.view(sums.shape[0], stored.shape[0], -1).transpose(0, 1)

    def compact(self, kept: Tensor, source: Tensor, target: Tensor) -> None:
        """Copies tokens at cache indexes `kept` [layers or 1, kv_heads or 1, tokens] int64 of the pages `source` to the
        first cache indexes of the pages `target`. Some of these may be the same.
        """
        token_bytes = kept.shape[-1] * self.storage.shape[1] * self.storage.itemsize // self.spec.page_size
        step = max(1, self.spec.num_layers * _MOST_COPIED_BYTES // token_bytes)
        for begin in range(0, self.spec.num_layers, step):
            layers = slice(begin, min(begin + step, self.spec.num_layers))
            self._compact_layers(layers, kept[layers] if kept.shape[0] > 1 else kept, source, target)

    def _compact_layers(self, layers: slice, kept: Tensor, source: Tensor, target: Tensor) -> None:
        """Implements `compact` for some layers of one page. What is copied is read as a whole before it is written."""
        size, device = self.spec.page_size, kept.device
        places = torch.arange(kept.shape[-1], device=device)
        layer = torch.arange(layers.stop - layers.start, device=device).view(-1, 1, 1)
        head = torch.arange(self.spec.num_kv_heads, device=device).view(-1, 1)
        sums = [] if self.attention_sums is None else [(self.attention_sums, True)]
        for pages, by_head in [*self._contents(), *sums]:
            # [layers, kv_heads, tokens, keys or values, head_dim], or without the last for scales
            some = pages[:, layers]
            read = source[kept // size], layer, slice(None), *_token_of_head(kept % size, head, by_head=by_head)
            write = target[places // size], layer, slice(None), *_token_of_head(places % size, head, by_head=by_head)
            some[write] = some[read]

    def _contents(self) -> list[tuple[Tensor, bool]]:
        """Returns what pages contain of tokens, [pages, layers, entries, page_size, kv_heads, ...], or with kv_heads
        before page_size where the second is True.
        """
        return [(self.pages, False)]

    def copied_tokens(self, copy: PageCopy) -> int:
        """Returns how many tokens of a page, as `pages` has them, a copy takes."""
        return copy.tokens

    def write(self, rows: Tensor, new: Tensor) -> Tensor:
        """Writes keys and values [tokens, 2, kv_heads, head_dim] to `rows`. Returns them as attention will read them
        there.

        The result may be `new` itself. Latents are written in the same manner.
        """
        new = new.contiguous()
        self.tokens.index_copy_(0, rows, new.view(-1, self.spec.row_width))
        return new

    def read(self, rows: Tensor, out: Tensor) -> Tensor:
        """Reads the tokens of these rows into `out` [rows, row_width]."""
        return torch.index_select(self.tokens, 0, rows, out=out)

    def token_rows_of(self, pages: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
        """Returns for each layer the rows of tokens at (page, offset): keys and values of the first token, of the next,
        ...

        A row is the number of a half page times its tokens, plus the offset in it.
        """
        tokens_in_page = self.spec.num_layers * self.spec.entries * self.spec.page_size
        rows = (pages * tokens_in_page + offsets).unsqueeze(1) + self._halves * self.spec.page_size
        return rows.flatten(1).unbind(0)

    def by_layer(self, rows_of_groups: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Returns rows for each layer of the model, given those for each layer of a page in each KV group."""
        if len(rows_of_groups) == 1:
            return rows_of_groups[0]
        return tuple(rows_of_groups[group][place] for group, place in self.places)

    def gather_rows(self, page_tables: Tensor) -> tuple[Tensor, ...]:
        """Returns rows of `half_pages` for each layer, keys first, for page ids of any shape, flattened."""
        rows = page_tables.reshape(-1) * (self.spec.entries * self.spec.num_layers) + self._halves.mT
        return rows.flatten(1).unbind(0)

    def gather(self, rows: Tensor, num_sequences: int) -> tuple[Tensor, Tensor]:
        """Returns one layer's keys and values of sequences with equally many pages, [sequences, tokens, kv_heads,
        head_dim].

        The next call overwrites their memory.
        """
        halves = self._gathered(rows)
        keys, values = halves.view(2, num_sequences, -1, self.spec.num_kv_heads, self.spec.head_dim).unbind(0)
        return keys, values

    def gather_latents(self, rows: Tensor, num_sequences: int) -> Tensor:
        """Returns latents [sequences, tokens, width] of a pool with one entry a token. They share `gather`'s memory."""
        return self._gathered(rows).view(num_sequences, -1, self.spec.row_width)

    def _gathered(self, rows: Tensor) -> Tensor:
        """Returns half pages in scratch memory: page faults of fresh memory would cost a CPU more than the copy."""
        scratch = self._scratch  # threads that compile kernels may replace it meanwhile
        if scratch.shape[0] < rows.shape[0]:
            scratch = self._scratch = self.half_pages.new_empty(rows.shape[0] * 5 // 4, self.half_pages.shape[1])
        return torch.index_select(self.half_pages, 0, rows, out=scratch[: rows.shape[0]])


def _token_of_head(token: Tensor, head: Tensor, *, by_head: bool) -> tuple[Tensor, Tensor]:
    """Returns the indexes of tokens in their page and of their heads in the order of the page's dimensions."""
    return (head, token) if by_head else (token, head)


def _both_sides(swaps: Sequence[PageSwap]) -> tuple[list[int], list[int]]:
    return [swap.device_page for swap in swaps], [swap.host_page for swap in swaps]
