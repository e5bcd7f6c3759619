"""Records which pages came to a tier and left it, as KV events of its medium."""

from collections.abc import Iterable, Iterator

from mini_infer_contract.events import BlockStored, KVEvent
from mini_infer_engine.core.kv_tiers.page_record import PageRecord
from mini_infer_engine.core.prefix_cache import Block, chains, events_of


class TierEvents:
    """The changes of one tier that no one has taken yet.

    Pages that part within a page have their first blocks in common: Stored is emitted with the first of these pages,
    Removed with the last.
    """

    def __init__(self, medium: str, *, are_recorded: bool) -> None:
        self.medium = medium
        self._are_recorded = are_recorded
        self.num_pages = 0
        """Pages in the tier whose blocks others hear of."""
        self._counts: dict[bytes, int] = {}
        """The number of pages that have a block, by its key."""
        self._changes: list[Block | list[bytes]] = []
        """Blocks that came, or keys of blocks that went together."""

    def stored(self, record: PageRecord) -> None:
        """Records that a page came. Parts of a recurrent state have no blocks to report."""
        self.num_pages += record.is_reported
        if not self._are_recorded or not record.is_reported:
            return
        counts = self._counts
        for block in record.blocks:
            count = counts[block.key] = counts.get(block.key, 0) + 1
            if count == 1:
                self._changes.append(block)

    def removed(self, record: PageRecord) -> None:
        """Records that a page went."""
        self.num_pages -= record.is_reported
        if not self._are_recorded or not record.is_reported:
            return
        gone: list[bytes] = []
        for block in record.blocks:
            self._counts[block.key] -= 1
            if not self._counts[block.key]:
                del self._counts[block.key]
                gone.append(block.key)
        if gone:
            self._changes.append(gone)

    def take(self) -> list[KVEvent]:
        """Returns the changes since the last call, in order."""
        changes, self._changes = self._changes, []
        return events_of(changes, self.medium) if changes else []

    def snapshot(self, records: Iterable[PageRecord]) -> list[BlockStored]:
        """Returns these pages as events, parents before those of their children that are among them."""
        blocks = {block.key: block for record in _parents_first(records) for block in record.blocks}
        return chains(blocks.values(), self.medium)


def _parents_first(records: Iterable[PageRecord]) -> Iterator[PageRecord]:
    waiting = {record.key: record for record in records if record.is_reported}
    while waiting:
        line = [waiting.popitem()[1]]
        while (parent := line[-1].blocks[0].parent) is not None and parent in waiting:
            line.append(waiting.pop(parent))
        yield from reversed(line)
