"""Finds cached prefixes where a model has several KV groups, or windows behind which pages are freed.

As in vLLM's `HybridKVCacheCoordinator`, groups that retain all tokens need the whole prefix, and groups with a window
only its last blocks. Other components see the blocks of group 0 alone.
"""

from collections import Counter
from collections.abc import Callable, Container
from functools import partial

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS
from mini_infer_contract.events import BlockStored
from mini_infer_engine.config.model.kv_groups import KVGroup
from mini_infer_engine.core.prefix_cache import Block, Hit, PrefixCache, block_of, chains
from mini_infer_engine.core.sequence import Sequence


class HybridPrefixCache(PrefixCache):
    """A `PrefixCache` of several KV groups, whose pages come from one pool.

    Page tables have `num_pages`, which is no page of the pool, in the place of pages that a group does not retain.
    """

    def __init__(
        self, num_pages: int, page_size: int, groups: tuple[KVGroup, ...], *, record_events: bool = True
    ) -> None:
        super().__init__(num_pages, page_size, record_events=record_events, num_groups=len(groups))
        self._specs = groups
        self._null_page = num_pages
        self._reported = _ReportedChains() if groups[0].window is not None and record_events else None

    def match_length(self, sequence: Sequence) -> int:
        """Returns the blocks of the longest cached prefix, without the last known token."""
        return self._match_length(sequence, 1)

    def match(self, sequence: Sequence) -> Hit:
        """Returns the longest prefix that is cached in all groups, and its pages, none of which is acquired."""
        return self._hit(sequence, self._match_length(sequence, 1))

    def match_whole_pages(self, sequence: Sequence) -> Hit:
        """Returns the longest such prefix of whole pages."""
        return self._hit(sequence, self._match_length(sequence, self._blocks_per_page))

    def publish(self, sequence: Sequence) -> None:
        """Registers, in each group, the blocks that launched passes fill and whose tokens are known."""
        begin = sequence.num_published
        end = min(sequence.num_computed, len(sequence.token_ids)) // BLOCK_SIZE_TOKENS
        if begin >= end:
            return
        keys = sequence.known_keys(end)
        for group, (blocks, pages) in enumerate(zip(self._groups, sequence.page_tables, strict=True)):
            for index in range(begin, end):
                page = pages[index // self._blocks_per_page]
                if page == self._null_page:
                    continue  # its group's window has passed it before its tokens were known
                block = blocks.get(keys[index])
                if block is None:
                    block = blocks[keys[index]] = block_of(sequence, index, group)
                    if not group and self._record_events:
                        self._record_stored(sequence, index, block)
                if page not in block.pages:  # a load may have begun before pages that its sequence has hit
                    self._add_to_page(block, page)
        sequence.num_published = end

    def longest_with_tiers(self, sequence: Sequence, count: int, has: Callable[[int, bytes], bool]) -> int:
        """Returns the most whole pages, up to `count`, of a prefix whose pages are all cached, or in a lower tier by
        `has`, which gets a group and the key of a page's last block.
        """
        keys, before = self._page_keys(sequence, count), -1
        while count != before:
            before = count
            for group, spec in enumerate(self._specs):
                places = _CachedOrBelow(self._groups[group], partial(has, group))
                if spec.window is None:  # from its beginning: most prompts have nothing in a tier
                    count = next((place for place in range(count) if keys[place] not in places), count)
                else:
                    count = longest_cached(places, keys, count, self._needed_pages(spec), 1)
        return count

    def hit_before_load(self, sequence: Sequence, count: int) -> tuple[Hit, list[tuple[int, int]]]:
        """Returns the first pages of each group that are cached, of a prefix of `count` pages, and the group and place
        of each page behind them that the groups need.
        """
        keys, hits, missing = self._page_keys(sequence, count), list[Hit](), list[tuple[int, int]]()
        for group, (blocks, spec) in enumerate(zip(self._groups, self._specs, strict=True)):
            first = spec.num_skipped_tokens(count * self.pool.page_size) // self.pool.page_size
            end = next((place for place in range(first, count) if keys[place] not in blocks), count)
            pages = [self._null_page] * first + [blocks[key].pages[0] for key in keys[first:end]]
            hits.append(Hit(end * self.pool.page_size, pages, None))
            missing += [(group, place) for place in range(end, count)]
        return Hit(hits[0].num_tokens, hits[0].pages, None, tuple(hits[1:])), missing

    def _page_keys(self, sequence: Sequence, count: int) -> list[bytes]:
        keys, step = sequence.known_keys(count * self._blocks_per_page), self._blocks_per_page
        return keys[step - 1 : count * step : step]

    def _needed_pages(self, spec: KVGroup) -> int:
        """Returns the pages before a token that a group with a window needs."""
        return max(1, -(-((spec.window or 0) - 1) // self.pool.page_size))

    def snapshot(self) -> list[BlockStored]:
        """Returns the blocks of group 0, parents before children."""
        return super().snapshot() if self._reported is None else chains(self._reported.blocks.values())

    def _match_length(self, sequence: Sequence, alignment: int) -> int:
        """Returns the blocks, a multiple of `alignment`, of the longest prefix that is cached in all groups.

        A shorter prefix may need other blocks of a window's group, so that the search is repeated until all groups
        agree.
        """
        if self._specs[0].window is None:
            count = super().match_length(sequence)
        else:
            count = (len(sequence.token_ids) - 1) // BLOCK_SIZE_TOKENS
        keys, before = sequence.known_keys(count), -1
        while count != before:
            before = count
            for blocks, spec in zip(self._groups, self._specs, strict=True):
                needed = count if spec.window is None else _blocks_in_window(spec.window)
                count = longest_cached(blocks, keys, count, needed, alignment)
        return count

    def _hit(self, sequence: Sequence, count: int) -> Hit:
        first, *others = (
            self._hit_in_group(sequence.keys, count, blocks, spec)
            for blocks, spec in zip(self._groups, self._specs, strict=True)
        )
        return Hit(first.num_tokens, first.pages, first.tail_page, tuple(others))

    def _hit_in_group(self, keys: list[bytes], count: int, blocks: dict[bytes, Block], spec: KVGroup) -> Hit:
        step, num_tokens = self._blocks_per_page, count * BLOCK_SIZE_TOKENS
        num_skipped = spec.num_skipped_tokens(num_tokens) // self.pool.page_size
        last_of_pages = keys[(num_skipped + 1) * step - 1 : count : step]
        pages = [self._null_page] * num_skipped + [blocks[key].pages[0] for key in last_of_pages]
        tail_page = blocks[keys[count - 1]].pages[0] if count % step else None
        return Hit(num_tokens, pages, tail_page)

    def _record_stored(self, sequence: Sequence, index: int, block: Block) -> None:
        if self._reported is None:
            self._changes.append(block)
        else:
            self._changes += self._reported.add(sequence, index, block)

    def _record_removed(self, keys: list[bytes]) -> None:
        gone = keys if self._reported is None else self._reported.remove(keys)
        if gone:
            self._changes.append(gone)


class _CachedOrBelow:
    """The pages of a group that are cached or in a lower tier, by the keys of their last blocks."""

    def __init__(self, cached: Container[bytes], is_below: Callable[[bytes], bool]) -> None:
        self._cached, self._is_below = cached, is_below

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and (key in self._cached or self._is_below(key))


class _ReportedChains:
    """The blocks that other components take for cached, where the first blocks of a prefix are evicted before its last.

    They look a prefix up from its first block on. So a block is reported as long as one that continues it is cached.
    """

    def __init__(self) -> None:
        self.blocks: dict[bytes, Block] = {}
        """The reported blocks, parents before children."""
        self._children: Counter[bytes] = Counter()
        """Reported blocks that continue a block, by its key."""
        self._evicted: set[bytes] = set()
        """Keys of reported blocks that are not cached."""

    def add(self, sequence: Sequence, index: int, block: Block) -> list[Block]:
        """Adds block `index` of a sequence. Returns those that are to be reported: it, and parents that are not."""
        first = index
        while first and sequence.keys[first - 1] not in self.blocks:
            first -= 1
        parents = [block_of(sequence, place) for place in range(first, index)]
        self._evicted.update(parent.key for parent in parents)
        self._evicted.discard(block.key)
        added = [one for one in (*parents, block) if one.key not in self.blocks]
        for one in added:
            self.blocks[one.key] = one
            if one.parent is not None:
                self._children[one.parent] += 1
        return added

    def remove(self, keys: list[bytes]) -> list[bytes]:
        """Removes blocks that were evicted. Returns those that are not reported any more, children before parents."""
        gone: list[bytes] = []
        self._evicted.update(keys)
        for key in reversed(keys):
            last: bytes | None = key
            while last is not None and last in self._evicted and not self._children[last]:
                self._evicted.discard(last)
                del self._children[last]
                gone.append(last)
                last = self.blocks.pop(last).parent
                if last is not None:
                    self._children[last] -= 1
        return gone


def longest_cached(blocks: Container[bytes], keys: list[bytes], count: int, needed: int, alignment: int) -> int:
    """Returns the most blocks up to `count`, a multiple of `alignment`, whose last `needed` are cached."""
    end = count - count % alignment
    index = end
    while end and index > max(0, end - needed):
        index -= 1
        if keys[index] not in blocks:
            end = index = index - index % alignment
    return end


def _blocks_in_window(window: int) -> int:
    """Returns the blocks before a token that it may see. At least one, so that the page before it has no gap."""
    return max(1, -(-(window - 1) // BLOCK_SIZE_TOKENS))
