"""Copies of blocks in several tiers, against a plain model, and the events by which vLLM reports its CPU offloading."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer_contract.blocks import block_keys
from mini_infer_contract.events import MEDIUM_DISK, MEDIUM_GPU, MEDIUM_HOST, AllBlocksCleared, BlockRemoved, BlockStored
from mini_infer_gateway.index.cached_blocks import Hit
from mini_infer_gateway.index.prefix_index import PrefixIndex, prompt_root

BLOCK = 16
MEDIA = (MEDIUM_GPU, MEDIUM_HOST, MEDIUM_DISK)
paths = st.lists(st.integers(0, 2), min_size=1, max_size=8)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("store"), paths, st.sampled_from(MEDIA)),
        st.tuples(st.just("remove"), st.integers(0, 99), st.sampled_from(MEDIA)),
    ),
    max_size=30,
)


def tokens_of(path: list[int], block: int = BLOCK) -> list[int]:
    return [100 * number + position for number in path for position in range(block)]


def stored(path: list[int], medium: str, block: int = BLOCK) -> BlockStored:
    hashes: list[Any] = [hash(tuple(path[: end + 1])) & (2**63 - 1) for end in range(len(path))]
    return BlockStored(hashes, None, tokens_of(path, block), block, medium=medium)


@settings(max_examples=300, deadline=None)
@given(steps, st.sampled_from([16, 32]))
def test_hits_by_tier_equal_those_of_a_plain_model(actions: list[tuple[str, Any, str]], block: int) -> None:
    index, copies, seen = PrefixIndex(10_000), dict[tuple[int, ...], set[str]](), list[list[int]]()
    for kind, value, medium in actions:
        if kind == "store":
            seen.append(value)
            index.apply("e", [stored(value, medium, block)])
            for end in range(1, len(value) + 1):
                copies.setdefault(tuple(value[:end]), set()).add(medium)
        elif copies:
            victim = list(copies)[value % len(copies)]
            index.apply("e", [BlockRemoved(stored(list(victim), medium).block_hashes[-1:], medium=medium)])
            copies[victim].discard(medium)
            if not copies[victim]:
                del copies[victim]
        keys_each = block // BLOCK
        for path in seen:
            fastest = list[str]()
            for end in range(1, len(path) + 1):
                if tuple(path[:end]) not in copies:
                    break
                fastest.append(min(copies[tuple(path[:end])], key=MEDIA.index))
            hit = index.hit("e", block_keys(tokens_of(path, block), prompt_root()), 0.0)
            counts = [fastest.count(medium) * keys_each for medium in MEDIA]
            assert (hit.blocks, hit.host_blocks, hit.disk_blocks) == (sum(counts), counts[1], counts[2])
    for path in seen:
        for medium in MEDIA:
            index.apply("e", [BlockRemoved(stored(path, medium).block_hashes, medium=medium)])
    assert index.total_blocks == 0
    assert not any(holdings.blocks._slow_rows for holdings in index._endpoints.values())


def test_blocks_stay_known_when_one_of_two_copies_is_removed() -> None:
    index, path = PrefixIndex(100), [1, 2, 3]
    index.apply("e", [stored(path, MEDIUM_GPU), stored(path, MEDIUM_HOST)])
    keys = block_keys(tokens_of(path), prompt_root())
    assert index.hit("e", keys, 0.0) == Hit(3, 0, 1)
    index.apply("e", [BlockRemoved(stored(path, MEDIUM_GPU).block_hashes[1:], medium=MEDIUM_GPU)])
    assert index.hit("e", keys, 0.0) == Hit(3, 0, 1, host_blocks=2)
    index.apply("e", [BlockRemoved(stored(path, MEDIUM_GPU).block_hashes[2:], medium=MEDIUM_HOST)])
    assert index.hit("e", keys, 0.0) == Hit(2, 0, 1, host_blocks=1)
    index.apply("e", [AllBlocksCleared()])
    assert index.hit("e", keys, 0.0).blocks == 0


def test_offloaded_blocks_count_when_vllm_names_them_by_hash_alone() -> None:
    """vLLM's offloading connector sends placeholders without tokens, parent and block size (its `events.py`)."""
    index, path = PrefixIndex(100), [1, 2, 3]
    on_device = stored(path, MEDIUM_GPU)
    placeholders = [BlockStored([block_hash], None, [], 0, medium="CPU") for block_hash in on_device.block_hashes]
    keys = block_keys(tokens_of(path), prompt_root())
    assert index.apply("e", [*placeholders]) == 3, "nothing says where they belong"
    assert index.apply("e", [on_device, *placeholders, BlockRemoved(on_device.block_hashes, medium="GPU")]) == 0
    assert index.hit("e", keys, 0.0) == Hit(3, 0, 1, host_blocks=3)


def test_offloaded_blocks_keep_the_place_of_the_device_when_their_event_lacks_the_salt() -> None:
    """vLLM's self-describing events of offloaded chunks have no extra keys."""
    index, path = PrefixIndex(100), [1, 2, 3]
    tokens, hashes = tokens_of(path), stored(path, MEDIUM_GPU).block_hashes
    salted = BlockStored(hashes, None, tokens, BLOCK, medium="GPU", extra_keys=[("salt",), None, None])
    index.apply("e", [salted, stored(path, "CPU"), BlockRemoved(hashes, medium="GPU")])
    assert index.hit("e", block_keys(tokens, prompt_root("", "salt")), 0.0).host_blocks == 3
    assert index.hit("e", block_keys(tokens, prompt_root()), 0.0).blocks == 0


@pytest.mark.parametrize(("medium", "blocks"), [("STORAGE", 3), ("DISK", 3), ("TAPE", 0)])
def test_only_known_media_count_when_an_event_names_one(medium: str, blocks: int) -> None:
    index, path = PrefixIndex(100), [1, 2, 3]
    index.apply("e", [stored(path, medium)])
    assert index.hit("e", block_keys(tokens_of(path), prompt_root()), 0.0) == Hit(blocks, 0, 1, disk_blocks=blocks)


def test_slow_blocks_of_a_shared_run_are_counted_when_a_prompt_ends_inside_it() -> None:
    index, path = PrefixIndex(1000), list(range(40))
    index.apply("e", [stored(path, MEDIUM_DISK), stored(path[:10], MEDIUM_GPU), stored(path[:20], MEDIUM_HOST)])
    keys = block_keys(tokens_of(path), prompt_root())
    for end, host, disk in ((5, 0, 0), (15, 5, 0), (20, 10, 0), (30, 10, 10), (40, 10, 20)):
        assert index.hit("e", keys[:end], 0.0) == Hit(end, 0, 1, host, disk)
    index.apply("e", [stored([*path[:25], 99, 98], MEDIUM_DISK)])
    assert index.hit("e", keys[:30], 0.0) == Hit(30, 25, 2, 10, 10)
    assert index.hit("e", keys[:22], 0.0) == Hit(22, 0, 1, 10, 2)


@pytest.mark.parametrize(
    ("hit", "blocks", "expected"),
    [
        (Hit(9, 2, 1, 3, 3), 9, Hit(9, 2, 1, 3, 3)),
        (Hit(9, 2, 1, 3, 3), 8, Hit(8, 2, 1, 3, 2)),
        (Hit(9, 2, 1, 3, 3), 4, Hit(4, 2, 1, 3, 0)),
        (Hit(9, 2, 1, 3, 0), 2, Hit(2, 2, 1, 2, 0)),
    ],
)
def test_slow_tiers_are_cut_first_when_a_hit_is_too_long(hit: Hit, blocks: int, expected: Hit) -> None:
    assert hit.cut(blocks) == expected
