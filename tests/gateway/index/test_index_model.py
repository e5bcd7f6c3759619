"""The index against a slow and plain model of it, and how long its calls take when it is large."""

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer_contract.blocks import block_keys
from mini_infer_contract.events import BlockRemoved, BlockStored
from mini_infer_gateway.index.cached_blocks import Hit
from mini_infer_gateway.index.key_chain import KeyChain
from mini_infer_gateway.index.prefix_index import SLICE_BLOCKS, PrefixIndex, prompt_root, slices

BLOCK = 16
Keys = list[bytes]


class PlainModel:
    """Sets and walks."""

    def __init__(self) -> None:
        self.parents: dict[bytes, bytes | None] = {}
        self.guesses: dict[bytes, float] = {}

    def store(self, keys: Keys) -> None:
        for position, key in enumerate(keys):
            self.parents[key] = keys[position - 1] if position else None
            self.guesses.pop(key, None)

    def leaves(self) -> Keys:
        inner = set(self.parents.values())
        return [key for key in self.parents if key not in inner]

    def guess(self, keys: Keys, expires_s: float) -> None:
        for key in keys:
            if key not in self.parents:
                self.guesses[key] = max(expires_s, self.guesses.get(key, 0.0))

    def hit(self, keys: Keys, now_s: float) -> Hit:
        blocks, shared, sharers = 0, 0, 1
        for position, key in enumerate(keys):
            if key in self.parents:
                children = sum(parent == key for parent in self.parents.values())
                if children > 1:
                    shared, sharers = position + 1, max(sharers, children)
            elif self.guesses.get(key, 0.0) <= now_s:
                break
            blocks = position + 1
        return Hit(blocks, shared, sharers)


def hash_of(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")


paths = st.lists(st.integers(0, 2), min_size=1, max_size=8)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("store"), paths),
        st.tuples(st.just("evict a leaf"), st.integers(0, 99)),
        st.tuples(st.just("guess"), paths),
        st.tuples(st.just("wait"), st.integers(1, 12)),
        st.tuples(st.just("expire"), st.just(0)),
    ),
    max_size=40,
)


def tokens_of(path: list[int]) -> list[int]:
    return [100 * number + position for number in path for position in range(BLOCK)]


@settings(max_examples=200, deadline=None)
@given(steps, st.booleans())
def test_index_hits_equal_those_of_a_plain_model(actions: list[tuple[str, Any]], packed: bool) -> None:
    index, model, now_s, seen = PrefixIndex(10_000), PlainModel(), 0.0, [[0], [1, 1], [2, 0, 1]]

    def as_chain(keys: Keys) -> Any:
        return KeyChain(keys) if packed else keys

    known = {tuple(path): block_keys(tokens_of(path), prompt_root()) for path in seen}
    for kind, value in actions:
        if kind in ("store", "guess"):
            seen.append(value)
            keys = known[tuple(value)] = block_keys(tokens_of(value), prompt_root())
            if kind == "store":
                index.apply("e", [BlockStored([hash_of(key) for key in keys], None, tokens_of(value), BLOCK)])
                model.store(keys)
            else:
                index.guess("e", as_chain(keys), now_s + 10)
                model.guess(keys, now_s + 10)
        elif kind == "evict a leaf" and (leaves := model.leaves()):
            key = leaves[value % len(leaves)]
            # An engine does not evict what a request sent there uses.
            if any(number > now_s for number in model.guesses.values()):
                continue
            index.apply("e", [BlockRemoved([hash_of(key)])])
            del model.parents[key]
        elif kind == "wait":
            now_s += value
        elif kind == "expire":
            while index.expire(now_s):
                pass
        for path in seen:
            for end in range(1, len(path) + 1):
                keys = known[tuple(path)][:end]
                expected = model.hit(keys, now_s)
                assert index.hit("e", as_chain(keys), now_s) == expected, (path[:end], kind, value)
                assert index.hits(["e", "other"], as_chain(keys), now_s) == [expected, Hit(0, 0, 1)]
    now_s += 100
    while index.expire(now_s):
        pass
    assert index.total_blocks == len(model.parents)
    index.clear("e")
    while index.expire(now_s):
        pass
    assert index.total_blocks == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(paths, st.lists(st.integers(0, 99), max_size=3)), max_size=12))
def test_the_index_has_no_false_hits_when_blocks_are_evicted_inside_a_chain(
    rounds: list[tuple[list[int], list[int]]],
) -> None:
    index, stored = PrefixIndex(10_000), dict[bytes, None]()
    for path, evicted in rounds:
        keys = block_keys(tokens_of(path), prompt_root())
        index.apply("e", [BlockStored([hash_of(key) for key in keys], None, tokens_of(path), BLOCK)])
        stored |= dict.fromkeys(keys)
        for choice in evicted:
            victim = list(stored)[choice % len(stored)] if stored else b""
            stored.pop(victim, None)
            index.apply("e", [BlockRemoved([hash_of(victim)])])
        for other, _ in rounds:
            keys = block_keys(tokens_of(other), prompt_root())
            expected = next((position for position, key in enumerate(keys) if key not in stored), len(keys))
            assert index.hit("e", keys, 0.0).blocks == expected
    index.apply("e", [BlockRemoved([hash_of(key) for key in stored])])
    assert index.total_blocks == 0
    assert not index._endpoints["e"].blocks._ghosts


def test_the_index_drops_chains_from_their_ends_when_it_is_full() -> None:
    index = PrefixIndex(100)
    chats = [block_keys(tokens_of([number] * 30), prompt_root()) for number in range(3)]
    for number, keys in enumerate(chats):
        index.apply("e", [BlockStored([hash_of(key) for key in keys], None, tokens_of([number] * 30), BLOCK)])
    index.guess("e", chats[0], 1.0)  # the first is used once more
    extra = block_keys(tokens_of([3] * 20), prompt_root())
    index.apply("e", [BlockStored([hash_of(key) for key in extra], None, tokens_of([3] * 20), BLOCK)])
    hits = [index.hit("e", keys, 0.0).blocks for keys in [*chats, extra]]
    assert hits[0] == 30
    assert 0 < hits[1] < 30, "the beginning of the oldest stays"
    assert hits[2:] == [30, 20]


def stored(first: int, blocks: int, seed: int) -> BlockStored:
    tokens = [(seed * 7919 + number) % 50_000 for number in range(blocks * BLOCK)]
    return BlockStored(list(range(first, first + blocks)), None, tokens, BLOCK)


def slow_calls(calls: list[Callable[[], Any]], limit_s: float = 0.02) -> list[float]:
    """CPU time of those that took longer than the limit: other programs of a busy machine do not count."""
    took = []
    for call in calls:
        began = time.thread_time()
        call()
        took.append(time.thread_time() - began)
    return [seconds for seconds in took if seconds > limit_s]


def drain(call: Callable[[], bool]) -> list[float]:
    took = []
    more = True
    while more:
        began = time.thread_time()
        more = call()
        took.append(time.thread_time() - began)
    return [seconds for seconds in took if seconds > 0.02]


@pytest.fixture
def without_garbage_collector() -> Iterator[None]:
    """It would walk the objects of all tests before; a gateway's are frozen."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_garbage_collector")
def test_index_calls_are_short_when_it_holds_two_million_tokens() -> None:
    """A snapshot, guesses, a full index, expiry and freeing: each step below what a waiting request notices."""
    index = PrefixIndex(140_000)
    chains = [stored(1_500 * number, 1_500, number) for number in range(84)]  # 126,000 blocks, two million tokens
    parts = list(slices(chains))
    assert max(sum(len(event.block_hashes) for event in part) for part in parts if part) <= SLICE_BLOCKS  # type: ignore[union-attr]
    assert slow_calls([lambda part=part: index.apply("e", part) for part in parts]) == []  # type: ignore[misc]
    assert index.cached_blocks("e") == 126_000
    prompts = [block_keys([number] * 32_000, prompt_root()) for number in range(20)]
    assert slow_calls([lambda keys=keys: index.guess("f", keys, 10.0) for keys in prompts]) == []  # type: ignore[misc]
    assert index.total_blocks <= 140_000, "the index was full on the way"
    assert slow_calls([lambda part=part: index.apply("g", part) for part in slices([stored(0, 30_000, 3)])]) == []  # type: ignore[misc]
    assert drain(lambda: index.expire(20.0)) == []
    for name in "efg":
        assert slow_calls([lambda name=name: index.clear(name)]) == []  # type: ignore[misc]
    assert drain(lambda: index.expire(20.0)) == []
    assert index.total_blocks == 0


@pytest.mark.parametrize("pods", [64, 128])
def test_hits_of_all_endpoints_are_found_faster_than_by_a_walk_over_blocks(pods: int) -> None:
    """32,000 tokens that every pod holds to another depth, against a walk over the blocks in the same run."""
    index = PrefixIndex(1_000_000)
    tokens = list(range(32_000))
    keys = block_keys(tokens, prompt_root())
    for pod in range(pods):
        part = 2_000 * (pod + 1) // pods
        index.apply(f"p{pod}", [BlockStored(list(range(part)), None, tokens[: part * BLOCK], BLOCK)])
    names = [f"p{pod}" for pod in range(pods)]

    def look() -> list[int]:
        return [hit.blocks for hit in index.hits(names, keys, 0.0)]

    def walk() -> list[int]:
        owners = [index._endpoints[name].blocks.owner for name in names]
        return [next((at for at, key in enumerate(keys) if key not in owner), len(keys)) for owner in owners]

    assert look() == walk() == [2_000 * (pod + 1) // pods for pod in range(pods)]
    assert 2 * fastest(look) < fastest(walk)


def fastest(call: Callable[[], Any]) -> float:
    """CPU seconds, the least of some tries."""
    took = []
    for _ in range(10):
        began = time.thread_time()
        call()
        took.append(time.thread_time() - began)
    return min(took)
