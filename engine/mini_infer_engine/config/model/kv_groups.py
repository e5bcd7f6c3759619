"""Derives the KV groups of a model from its config: which layers share a page table, and what each group retains.

As in vLLM's hybrid KV cache manager, all groups have equally many layers, so that a page of any group has one size and
all groups allocate from one pool. Pure data: it knows neither torch nor tensors, requests nor pages in use.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

KVGroupKind = Literal["full_attention", "sliding_window", "latent", "recurrent_state"]

_MOST_PADDING = 0.05
"""Share of layers that may stay unused in pages, of all layers and of those that retain all tokens. vLLM takes the
layers of its smaller kind, which would leave 8 of 70 unused in Gemma 3 27B.
"""
_MOST_GROUPS = 16
"""Page tables of a sequence: each costs a page at every page boundary."""
_MOST_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share a page table, because they retain keys and values of the same tokens.

    A group of the kind "recurrent_state" has no pages: its layers have one state for each sequence.
    """

    kind: KVGroupKind
    layers: tuple[int, ...]
    """The layers in ascending order. The n-th of them is the n-th layer of the group's pages."""
    window: int | None = None
    """Tokens that a token sees, itself among them, of a group of the kind "sliding_window"."""

    def num_skipped_tokens(self, num_computed: int) -> int:
        """Returns how many of the first `num_computed` tokens no later token sees and a group need not retain."""
        return 0 if self.window is None else max(0, num_computed - self.window + 1)

    def most_pages(self, num_tokens: int, page_size: int, chunk_tokens: int) -> int:
        """Returns the most pages that a sequence of `num_tokens` uses at once if no chunk is over `chunk_tokens`.

        Before a chunk is computed, the pages wholly behind the window of its first token are freed.
        """
        pages = _pages_for(num_tokens, page_size)
        if self.window is None:
            return pages
        return min(pages, _pages_for(self.window + chunk_tokens, page_size) + 1)


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The KV groups of a model. The groups that retain all tokens come first."""

    groups: tuple[KVGroup, ...]
    layers_per_page: int
    """Layers of a page. Groups with fewer layers leave the rest of their pages unused."""
    state_group: KVGroup | None = None
    """The layers with a recurrent state, which is in slots outside of the page pool; None if there are none."""
    num_checkpoints: int = 0
    """Slots for checkpoints of recurrent state, beside those of the running sequences."""

    @property
    def is_uniform(self) -> bool:
        """True if one page table serves all layers, and no page is freed before its sequence ends."""
        return len(self.groups) == 1 and self.groups[0].window is None and self.state_group is None

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The group of each layer of the model, and the layer's index in the group's pages."""
        places = {
            layer: (index, place) for index, group in enumerate(self.groups) for place, layer in enumerate(group.layers)
        }
        return tuple(places[layer] for layer in sorted(places))

    def most_pages(self, num_tokens: int, page_size: int, chunk_tokens: int) -> int:
        """Returns the most pages, of all groups, that a sequence of `num_tokens` uses at once."""
        return sum(group.most_pages(num_tokens, page_size, chunk_tokens) for group in self.groups)

    def most_tokens(self, num_pages: int, page_size: int, chunk_tokens: int) -> int:
        """Returns the length of the longest sequence that fits into a pool of `num_pages`.

        It is a number that no sequence reaches if every group has a window that fits.
        """
        return bisect_right(
            range(1, _MOST_TOKENS), num_pages, key=lambda tokens: self.most_pages(tokens, page_size, chunk_tokens)
        )

    def __str__(self) -> str:
        """Returns the groups in words, for the log."""
        names = [
            f"{len(group.layers)} layers with "
            + ("all tokens" if group.window is None else f"a window of {group.window} tokens")
            for group in self.groups
        ]
        if self.state_group is not None:
            names.append(f"{len(self.state_group.layers)} layers with a recurrent state")
        counts = {name: names.count(name) for name in names}
        return ", ".join(name if count == 1 else f"{count} times {name}" for name, count in counts.items())


def uniform_kv_cache(num_layers: int, *, caches_latents: bool = False) -> KVCacheConfig:
    """Returns the layout with one group of all layers, which retains all tokens, whatever windows the layers have."""
    group = KVGroup("latent" if caches_latents else "full_attention", tuple(range(num_layers)))
    return KVCacheConfig((group,), num_layers)


UNIFORM = uniform_kv_cache(1)
"""The uniform layout for code that does not depend on the number of layers."""


def kv_cache_config(
    windows: Sequence[int | None], max_model_len: int, *, caches_latents: bool = False
) -> KVCacheConfig:
    """Returns the KV groups of a model whose layers have these windows, for contexts of up to `max_model_len` tokens.

    A window that no sequence leaves counts as none.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window if window is not None and window < max_model_len else None, []).append(layer)
    if caches_latents or set(kinds) == {None}:
        return uniform_kv_cache(len(windows), caches_latents=caches_latents)
    layers_per_page = _layers_per_page({window: len(layers) for window, layers in kinds.items()})
    groups = [
        KVGroup("full_attention" if window is None else "sliding_window", tuple(part), window)
        for window, layers in kinds.items()
        for part in _parts(layers, layers_per_page)
    ]
    return KVCacheConfig(tuple(sorted(groups, key=lambda group: group.window is not None)), layers_per_page)


def _layers_per_page(kinds: dict[int | None, int]) -> int:
    """Returns the layers of a page for so many layers of each window: the most that leave few of them unused."""

    def padding(size: int) -> tuple[float, float]:
        unused = {window: -count % size for window, count in kinds.items()}
        return unused.get(None, 0) / kinds.get(None, 1), sum(unused.values()) / sum(kinds.values())

    sizes = range(max(kinds.values()), 0, -1)
    possible = [size for size in sizes if sum(-(-count // size) for count in kinds.values()) <= _MOST_GROUPS]
    little = (size for size in possible if max(padding(size)) <= _MOST_PADDING)
    return next(little, min(possible, key=lambda size: sum(padding(size)), default=1))


def _parts(layers: list[int], size: int) -> list[list[int]]:
    """Splits layers into as few parts of at most `size` as possible, of nearly equal size."""
    count = -(-len(layers) // size)
    return [layers[start::count] for start in range(count)]


def _pages_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)
