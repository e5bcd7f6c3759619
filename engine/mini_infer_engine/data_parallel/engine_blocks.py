"""Tracks which engine of a server holds which blocks, from the events of each, and merges the events for gateways.

Blocks are named by the engines' own hashes: all engines of a server run the same model, so equal hashes mean equal
prefixes. Pure: no sockets, no clock.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache

from msgspec.structs import replace

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS, block_keys, root_key
from mini_infer_contract.events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent, wire_hash
from mini_infer_engine.core.images import key_ids
from mini_infer_engine.core.request import ImageInput

_root_key = lru_cache(maxsize=1024)(root_key)


def prompt_hashes(token_ids: Sequence[int], revision: str, salt: str, images: Sequence[ImageInput] = ()) -> list[int]:
    """Returns the names of the full blocks from which a prompt can be served. Its last token must be
    computed anyway.
    """
    whole = (len(token_ids) - 1) // BLOCK_SIZE_TOKENS * BLOCK_SIZE_TOKENS
    token_ids = token_ids[:whole]
    if images:
        token_ids = key_ids(array("I", token_ids), 0, images)
    return [wire_hash(key) for key in block_keys(token_ids, _root_key(revision, "", salt))]


class EngineBlocks:
    """The blocks of each engine, and those that it will hold once it has computed the prompts that were sent to it."""

    def __init__(self, engines: int) -> None:
        self._stored: list[defaultdict[str | None, set[BlockHash]]] = [defaultdict(set) for _ in range(engines)]
        """The blocks of each engine, by medium: one may be in several."""
        self._promised: list[Counter[BlockHash]] = [Counter() for _ in range(engines)]

    def apply(self, engine: int, events: Iterable[KVEvent]) -> list[KVEvent]:
        """Applies an engine's events in order, and returns the resulting events of the server as a whole.

        It emits every stored block, even if another engine holds it: a gateway that reads a snapshot made between
        events needs each of them. It emits the removal of a block from a medium when no engine holds it there any more.
        """
        merged: list[KVEvent] = []
        for event in events:
            match event:
                case BlockStored():
                    self._stored[engine][event.medium].update(event.block_hashes)
                    merged.append(event)
                case BlockRemoved():
                    self._stored[engine][event.medium].difference_update(event.block_hashes)
                    if removed := self._gone(event.block_hashes, event.medium):
                        merged.append(replace(event, block_hashes=removed))
                case AllBlocksCleared():
                    merged += self._cleared(engine)
        return merged

    def _gone(self, names: Iterable[BlockHash], medium: str | None) -> list[BlockHash]:
        """Returns those of these blocks that no engine holds in this medium."""
        holding = [stored[medium] for stored in self._stored]
        return [name for name in names if not any(name in blocks for blocks in holding)]

    def _cleared(self, engine: int) -> list[KVEvent]:
        mine, self._stored[engine] = self._stored[engine], defaultdict(set)
        if not any(blocks for stored in self._stored for blocks in stored.values()):
            return [AllBlocksCleared()]
        gone = ((self._gone(names, medium), medium) for medium, names in mine.items())
        return [BlockRemoved(names, medium=medium) for names, medium in gone if names]

    def promise(self, engine: int, hashes: Sequence[int]) -> None:
        """Adds the blocks of a prompt that was sent to an engine."""
        self._promised[engine].update(hashes)

    def settle(self, engine: int, hashes: Sequence[int]) -> None:
        """Removes the blocks of a prompt that was computed, which events report, or never will be."""
        promised = self._promised[engine]
        for name in hashes:
            if promised[name] > 1:
                promised[name] -= 1
            else:
                del promised[name]

    def depth(self, engine: int, hashes: Sequence[int]) -> int:
        """Returns the number of prompt tokens in these blocks that an engine need not compute."""
        held, blocks = [*self._stored[engine].values(), self._promised[engine]], 0
        for name in hashes:
            if not any(name in names for names in held):
                break
            blocks += 1
        return blocks * BLOCK_SIZE_TOKENS
