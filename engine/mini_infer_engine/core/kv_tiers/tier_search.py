"""Finds the pages of lower tiers with which a prompt's prefix continues, and chooses those that are worth loading."""

from collections.abc import Iterable
from collections.abc import Sequence as Items

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS
from mini_infer_engine.core.hybrid_prefix_cache import HybridPrefixCache
from mini_infer_engine.core.kv_tiers.host_blocks import HostBlocks
from mini_infer_engine.core.kv_tiers.load_choice import CopyCost, pages_to_load, pages_to_resume_after
from mini_infer_engine.core.kv_tiers.loads import Loads, TierPage, TierState
from mini_infer_engine.core.kv_tiers.page_record import group_key, later_part_keys, state_key
from mini_infer_engine.core.kv_tiers.tier import Tier
from mini_infer_engine.core.kv_tiers.tier_index import DiskIndex
from mini_infer_engine.core.kv_tiers.tier_match import NO_MATCH, TierMatch
from mini_infer_engine.core.prefix_cache import Hit, PrefixCache
from mini_infer_engine.core.sequence import Sequence
from mini_infer_engine.core.state_checkpoints import StateCheckpoints


class TierSearch:
    """Looks prefixes up in main memory and on the disk. It begins no load, and counts what it declines."""

    def __init__(
        self,
        cache: PrefixCache,
        host: HostBlocks,
        disk: DiskIndex,
        tiers: tuple[Tier, Tier],
        loads: Loads,
        checkpoints: StateCheckpoints | None,
        *,
        pages_per_state: int,
        compute_tokens_per_s: float,
    ) -> None:
        """Searches the blocks in main memory and on the disk, whose costs and counters `tiers` are in this order.
        `checkpoints` are those of a model with recurrent state, which takes `pages_per_state` pages.
        """
        self._cache = cache
        self._host, self._disk = host, disk
        self._host_tier, self._disk_tier = tiers
        self._loads = loads
        self._checkpoints = checkpoints
        self._pages_per_state = pages_per_state
        self._page_size = cache.pool.page_size
        self._blocks_per_page = self._page_size // BLOCK_SIZE_TOKENS
        self.compute_tokens_per_s = compute_tokens_per_s
        """The rate at which the device computes prompts."""

    def match(self, sequence: Sequence, hit: Hit) -> TierMatch:
        """Returns the pages with which the prefix of a waiting sequence continues after the whole pages of `hit`.

        The last known token is never among theirs: it must be computed for its logits.
        """
        return self._match(sequence, hit, counts_declined=True)

    def to_prefetch(self, sequence: Sequence) -> TierMatch:
        """Returns the pages with which the prefix of a sequence that does not wait continues on the device."""
        return self._match(sequence, self.resumable(sequence), counts_declined=False)

    def _match(self, sequence: Sequence, hit: Hit, *, counts_declined: bool) -> TierMatch:
        if sequence.group is not None or not sequence.may_hit or not sequence.may_load or not self._host_tier.is_on:
            return NO_MATCH
        if isinstance(self._cache, HybridPrefixCache):
            return self._match_groups(self._cache, sequence, hit, counts_declined=counts_declined)
        on_device = hit.without_tail(self._page_size)
        if self._checkpoints is not None:  # pages of a hit end with a checkpoint; the prefix may have more
            on_device = self._cache.match(sequence).without_tail(self._page_size)
        found = self._continuation(sequence, len(on_device.pages))
        if found is None:
            return TierMatch(is_awaited=True)
        if self._checkpoints is not None:
            return self._match_with_state(sequence, len(hit.pages), on_device, found, counts_declined=counts_declined)
        count = self._num_worth_loading(found)
        if counts_declined:
            self._decline(found[count:])
        return TierMatch(tuple(found[:count]), hit=on_device) if count else NO_MATCH

    def _match_with_state(
        self, sequence: Sequence, num_resumable: int, on_device: Hit, found: Items[TierPage], *, counts_declined: bool
    ) -> TierMatch:
        """Returns the pages and the state that are worth loading, for a model with recurrent state."""
        num_on_device = len(on_device.pages)
        limit = min(num_on_device + len(found), self._most_pages(sequence))
        states: dict[int, TierState] = {}
        for end in range(num_resumable + 1, limit + 1):
            key = self.key(sequence, end)
            if self._loads.is_loading(state_key(key)):
                return TierMatch(is_awaited=True)
            state = self._find_state(key)
            if state is not None:
                states[end] = state
        media = [page.tier.name for page in found]
        parts = {end: [part.tier.name for part in state.parts] for end, state in states.items()}
        end = pages_to_resume_after(
            num_resumable, num_on_device, media, parts, self._page_size, self._costs, self.compute_tokens_per_s
        )
        if counts_declined and states:
            self._decline(found[max(0, end - num_on_device) : max(0, max(states) - num_on_device)])
        if end == num_resumable:
            return NO_MATCH
        hit = Hit(min(end, num_on_device) * self._page_size, on_device.pages[:end], None)
        return TierMatch(tuple(found[: max(0, end - num_on_device)]), hit=hit, state=states[end])

    def _match_groups(
        self, cache: HybridPrefixCache, sequence: Sequence, hit: Hit, *, counts_declined: bool
    ) -> TierMatch:
        """Returns the pages of all KV groups that make the longest prefix, if they are worth loading: of groups with a
        window the last ones alone.
        """
        num_resumable, end = hit.num_tokens // self._page_size, self._most_pages(sequence)
        while True:
            end = cache.longest_with_tiers(sequence, end, lambda group, key: self.has(group_key(key, group)))
            if end <= num_resumable:
                return NO_MATCH
            on_device, places = cache.hit_before_load(sequence, end)
            keys = [group_key(self.key(sequence, place + 1), group) for group, place in places]
            found = self._find_first(keys)
            if len(found) == len(keys):
                break
            end = places[len(found)][1]
        if any(map(self._loads.is_loading, keys)):
            return TierMatch(is_awaited=True)
        media = {end: [page.tier.name for page in found]}
        arguments = (num_resumable, end, (), media, self._page_size, self._costs, self.compute_tokens_per_s)
        if pages_to_resume_after(*arguments) == num_resumable:
            if counts_declined:
                self._decline([page for page, (group, _) in zip(found, places, strict=True) if not group])
            return NO_MATCH
        return TierMatch(tuple(found), hit=on_device, places=tuple(places), num_pages=end)

    def _find_state(self, key: bytes) -> TierState | None:
        """Returns where the state after the block of this key is; None if not all of it is anywhere."""
        assert self._checkpoints is not None
        if key in self._checkpoints:
            return TierState(key, ())
        if not self._checkpoints.num_free:
            return None
        for first in (self._find_on_host(state_key(key)), self._find_on_disk(state_key(key))):
            if first is not None:
                keys = later_part_keys(key, first.record.digest, self._pages_per_state)
                parts = [first, *(part for part in map(self._find, keys) if part is not None)]
                if len(parts) == 1 + len(keys):
                    return TierState(key, tuple(parts))
        return None

    def _most_pages(self, sequence: Sequence) -> int:
        """Returns the most pages of a sequence that may be cached."""
        return (len(sequence.token_ids) - 1) // self._page_size

    def key(self, sequence: Sequence, num_pages: int) -> bytes:
        """Returns the key of the last block of a sequence's page, of which there are so many up to it."""
        return sequence.key(num_pages * self._blocks_per_page - 1)

    def _continuation(self, sequence: Sequence, num_on_device: int) -> list[TierPage] | None:
        """Returns the pages of lower tiers that continue a prefix; None if the first of them is being loaded."""
        ends = range(num_on_device + 1, self._most_pages(sequence) + 1)
        if ends and self._loads.is_loading(self.key(sequence, ends[0])):
            return None
        return self._find_first(self.key(sequence, end) for end in ends)

    @property
    def _costs(self) -> dict[str, CopyCost]:
        return {tier.name: tier.cost for tier in (self._host_tier, self._disk_tier)}

    def _num_worth_loading(self, found: Items[TierPage]) -> int:
        media = [page.tier.name for page in found]
        return pages_to_load(media, self._page_size, self._costs, self.compute_tokens_per_s)

    def _decline(self, pages: Items[TierPage]) -> None:
        for page in pages:
            page.tier.declined(self._page_size)

    def has(self, key: bytes) -> bool:
        """Returns True if a lower tier has the page with this key."""
        return key in self._host or key in self._disk

    def resumable(self, sequence: Sequence) -> Hit:
        """Returns the whole pages from which a sequence could go on without any load."""
        hit = self._cache.match(sequence).without_tail(self._page_size)
        if self._checkpoints is None:
            return hit
        ends = range(len(hit.pages), 0, -1)
        count = next((end for end in ends if self.key(sequence, end) in self._checkpoints), 0)
        return Hit(count * self._page_size, hit.pages[:count], None)

    def _find(self, key: bytes) -> TierPage | None:
        return self._find_on_host(key) or self._find_on_disk(key)

    def _find_first(self, keys: Iterable[bytes]) -> list[TierPage]:
        """Returns the pages with these keys up to the first that no lower tier has."""
        found: list[TierPage] = []
        for key in keys:
            page = self._find(key)
            if page is None:
                break
            found.append(page)
        return found

    def _find_on_host(self, key: bytes) -> TierPage | None:
        page = self._host.page(key)
        record = None if page is None else self._host.record(page)
        return None if record is None else TierPage(self._host_tier, record)

    def _find_on_disk(self, key: bytes) -> TierPage | None:
        page = self._disk.page(key) if self._disk_tier.is_on else None
        return None if page is None else TierPage(self._disk_tier, page.record, page.location)
