"""Derives the KV groups of a model from its config: which layers share a page table, and what each group retains.

As in vLLM's hybrid KV cache manager, all groups have equally many layers, so that a page of any group has one size and
all groups allocate from one pool. Layers whose keys differ in width take differently many units of a page. Pure data:
it knows neither torch nor tensors, requests nor pages in use.
"""

import math
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
    """Layers of a page, or units if there are `layer_units`. Groups with fewer leave the rest of their pages unused."""
    state_group: KVGroup | None = None
    """The layers with a recurrent state, which is in slots outside of the page pool; None if there are none."""
    num_checkpoints: int = 0
    """Slots for checkpoints of recurrent state, beside those of the running sequences."""
    layer_units: tuple[int, ...] = ()
    """The units of a page that each layer takes, if layers differ; a layer begins at a multiple of its own number."""

    @property
    def is_uniform(self) -> bool:
        """True if one page table serves all layers, and no page is freed before its sequence ends."""
        return len(self.groups) == 1 and self.groups[0].window is None and self.state_group is None

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The group of each layer of the model, and the layer's index in the group's pages.

        With `layer_units` it is the index among layers of the same width, if a page had no others.
        """
        places = {
            layer: (index, place)
            for index, group in enumerate(self.groups)
            for layer, place in zip(group.layers, self._places(group.layers), strict=True)
        }
        return tuple(places[layer] for layer in sorted(places))

    def _places(self, layers: Sequence[int]) -> Sequence[int]:
        if not self.layer_units:
            return range(len(layers))
        units = [self.layer_units[layer] for layer in layers]
        return [begin // each for begin, each in zip(_offsets(units)[0], units, strict=True)]

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


def uniform_kv_cache(num_layers: int, *, caches_latents: bool = False, units: Sequence[int] = ()) -> KVCacheConfig:
    """Returns the layout with one group of all layers, which retains all tokens, whatever windows the layers have.

    `units` are those of each layer, if layers differ in width.
    """
    group = KVGroup("latent" if caches_latents else "full_attention", tuple(range(num_layers)))
    if not units:
        return KVCacheConfig((group,), num_layers)
    return KVCacheConfig((group,), _offsets(units)[1], layer_units=tuple(units))


UNIFORM = uniform_kv_cache(1)
"""The uniform layout for code that does not depend on the number of layers."""


def kv_cache_config(
    windows: Sequence[int | None], max_model_len: int, *, caches_latents: bool = False, units: Sequence[int] = ()
) -> KVCacheConfig:
    """Returns the KV groups of a model whose layers have these windows, for contexts of up to `max_model_len` tokens.

    A window that no sequence leaves counts as none. `units` are those of each layer, if layers differ in width: a group
    has layers of one width.
    """
    kinds: dict[tuple[int | None, int], list[int]] = {}
    for layer, window in enumerate(windows):
        width = units[layer] if units else 1
        kinds.setdefault((window if window is not None and window < max_model_len else None, width), []).append(layer)
    if caches_latents or {window for window, _ in kinds} == {None}:
        return uniform_kv_cache(len(windows), caches_latents=caches_latents, units=units)
    layers_per_page = _layers_per_page({kind: len(layers) for kind, layers in kinds.items()})
    groups = [
        KVGroup("full_attention" if window is None else "sliding_window", tuple(part), window)
        for (window, width), layers in kinds.items()
        for part in _parts(layers, layers_per_page // width)
    ]
    ordered = tuple(sorted(groups, key=lambda group: group.window is not None))
    return KVCacheConfig(ordered, layers_per_page, layer_units=tuple(units))


def _offsets(units: Sequence[int]) -> tuple[list[int], int]:
    """Returns the first unit of each layer in a page that has them all, wide ones first, and the units of the page.

    Both are multiples of the layer's own units, so that a page of any width divides into whole layers.
    """
    offsets, end = [0] * len(units), 0
    for place in sorted(range(len(units)), key=lambda place: -units[place]):
        offsets[place] = -(-end // units[place]) * units[place]
        end = offsets[place] + units[place]
    step = math.lcm(*units)
    return offsets, -(-end // step) * step


def _layers_per_page(kinds: dict[tuple[int | None, int], int]) -> int:
    """Returns the units of a page for so many layers of each window and width: the most that leave few unused."""
    totals = {(window, width): count * width for (window, width), count in kinds.items()}
    retained = sum(total for (window, _), total in totals.items() if window is None)

    def padding(size: int) -> tuple[float, float]:
        unused = {kind: -count % (size // kind[1]) * kind[1] for kind, count in kinds.items()}
        of_retained = sum(units for (window, _), units in unused.items() if window is None)
        return of_retained / (retained or 1), sum(unused.values()) / sum(totals.values())

    step = math.lcm(*(width for _, width in kinds))
    sizes = range(-(-max(totals.values()) // step) * step, 0, -step)
    possible = [
        size
        for size in sizes
        if sum(-(-count // (size // width)) for (_, width), count in kinds.items()) <= _MOST_GROUPS
    ]
    little = (size for size in possible if max(padding(size)) <= _MOST_PADDING)
    return next(little, min(possible, key=lambda size: sum(padding(size)), default=step))


def _parts(layers: list[int], size: int) -> list[list[int]]:
    """Splits layers into as few parts of at most `size` as possible, of nearly equal size."""
    count = -(-len(layers) // size)
    return [layers[start::count] for start in range(count)]


def _pages_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)
