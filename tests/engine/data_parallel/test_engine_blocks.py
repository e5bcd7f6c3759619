"""What a server holds is what any of its engines holds: random caches, their events, and snapshots in between."""

import random

import pytest
from msgspec.structs import replace

from mini_infer_contract.blocks import block_keys, root_key
from mini_infer_contract.events import (
    MEDIUM_GPU,
    MEDIUM_HOST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    block_stored,
    wire_hash,
)
from mini_infer_contract.images import image_key_ids
from mini_infer_engine.core.request import ImageInput
from mini_infer_engine.data_parallel.engine_blocks import EngineBlocks, prompt_hashes

TOKENS = [*range(100)]
HASHES = [wire_hash(key) for key in block_keys(TOKENS, root_key("m"))]


def stored(*names: int) -> BlockStored:
    return BlockStored(list(names), None, [0] * 16 * len(names), 16)


def seen_by_a_gateway(stored: set[object], events: list[KVEvent]) -> set[object]:
    for event in events:
        match event:
            case BlockStored():
                stored = stored | set(event.block_hashes)
            case BlockRemoved():
                stored = stored - set(event.block_hashes)
            case AllBlocksCleared():
                stored = set()
    return stored


def test_names_are_those_of_the_engines_events() -> None:
    event = block_stored(block_keys(TOKENS, root_key("m", "", "salt")), None, TOKENS[:96], "salt")
    assert prompt_hashes(TOKENS, "m", "salt") == event.block_hashes
    assert prompt_hashes(TOKENS[:97], "m", "") == HASHES
    assert prompt_hashes(TOKENS[:96], "m", "") == HASHES[:5], "the last token is computed anyway"


def test_names_are_those_of_the_engines_events_when_a_prompt_has_an_image() -> None:
    image = ImageInput(offset=20, num_tokens=30, digest=bytes(range(32)), grid=(1, 1, 1), shape=(), pixels=b"")
    ids = [*TOKENS[:20], *image_key_ids(image.digest, 30), *TOKENS[50:]]
    names = [wire_hash(key) for key in block_keys(ids, root_key("m"))]
    assert prompt_hashes(TOKENS, "m", "", [image]) == names != HASHES


def test_prefix_depth_ends_at_the_first_missing_block() -> None:
    blocks = EngineBlocks(2)
    blocks.apply(1, [stored(*HASHES[:2], *HASHES[3:])])
    assert [blocks.depth(engine, HASHES) for engine in (0, 1)] == [0, 32]
    blocks.promise(0, HASHES)
    blocks.promise(0, HASHES[:1])
    assert blocks.depth(0, HASHES) == 96
    blocks.settle(0, HASHES)
    assert blocks.depth(0, HASHES) == 16
    blocks.settle(0, HASHES[:1])
    assert blocks.depth(0, HASHES) == 0


def test_a_block_is_gone_when_its_last_holder_lets_it_go() -> None:
    blocks = EngineBlocks(2)
    assert blocks.apply(0, [stored(1, 2)]) == [stored(1, 2)]
    blocks.apply(1, [stored(2)])
    assert blocks.apply(0, [BlockRemoved([1, 2])]) == [BlockRemoved([1])]
    assert blocks.apply(1, [BlockRemoved([2])]) == [BlockRemoved([2])]


def test_block_is_held_when_it_is_left_in_a_lower_tier_alone() -> None:
    blocks = EngineBlocks(2)
    on_device, in_memory = (replace(stored(*HASHES[:2]), medium=medium) for medium in (MEDIUM_GPU, MEDIUM_HOST))
    blocks.apply(0, [on_device, in_memory])
    blocks.apply(1, [in_memory])
    gone = BlockRemoved(list(HASHES[:2]), medium=MEDIUM_GPU)
    assert blocks.apply(0, [gone]) == [gone]
    assert blocks.depth(0, HASHES) == 32
    assert blocks.apply(0, [replace(gone, medium=MEDIUM_HOST)]) == []
    assert [blocks.depth(engine, HASHES) for engine in (0, 1)] == [0, 32]


def test_only_its_own_blocks_are_removed_when_an_engine_clears_its_cache() -> None:
    blocks = EngineBlocks(2)
    blocks.apply(0, [stored(1, 2)])
    blocks.apply(1, [stored(2, 3)])
    assert blocks.apply(0, [AllBlocksCleared()]) == [BlockRemoved([1])]
    assert blocks.apply(1, [AllBlocksCleared()]) == [AllBlocksCleared()]


@pytest.mark.parametrize("seed", range(20))
def test_merged_events_and_snapshots_equal_the_union_of_engines(seed: int) -> None:
    """A snapshot has each engine's blocks at another moment, and all events since before the first of them."""
    rng, engines = random.Random(seed), 3
    caches: list[set[int]] = [set() for _ in range(engines)]
    blocks = EngineBlocks(engines)
    live: set[object] = set()
    snapshot: set[object] = set()
    since: list[KVEvent] = []
    begin = rng.randrange(200)
    snapshot_at = {begin + rng.randrange(60): engine for engine in range(engines)}
    while len(snapshot_at) < engines:
        snapshot_at = {begin + rng.randrange(60): engine for engine in range(engines)}
    for moment in range(400):
        engine, name = rng.randrange(engines), rng.randrange(12)
        cache = caches[engine]
        event: KVEvent = BlockRemoved([name]) if name in cache else stored(name)
        cache.symmetric_difference_update({name})
        if rng.random() < 0.02:
            event = AllBlocksCleared()
            cache.clear()
        events = blocks.apply(engine, [event])
        live = seen_by_a_gateway(live, events)
        assert live == set[object]().union(*caches)
        if moment >= begin:
            since += events
        if moment in snapshot_at:
            snapshot |= caches[snapshot_at[moment]]
    assert seen_by_a_gateway(snapshot, since) == live
