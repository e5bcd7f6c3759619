"""The index against a model: whatever an endpoint stores, evicts and clears, the index says the same."""

import hashlib
from collections.abc import Sequence
from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer_contract.blocks import block_keys
from mini_infer_contract.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from mini_infer_gateway.index.key_chain import KeyChain
from mini_infer_gateway.index.prefix_index import PrefixIndex, prompt_root

BLOCK = 16
NEVER = 1e9


def foreign_hash(parent: int | None, tokens: Sequence[int], salt: str) -> int:
    digest = hashlib.md5(repr((parent, tuple(tokens), salt if parent is None else "")).encode()).digest()
    return int.from_bytes(digest[:8], "big")


class ForeignCache:
    """An engine with hashes and a block size of its own; evicts any leaf."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: dict[int, tuple[int | None, list[int], str]] = {}

    def chain(self, tokens: list[int], salt: str) -> list[tuple[int, int | None, list[int]]]:
        parent: int | None = None
        chain: list[tuple[int, int | None, list[int]]] = []
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            block = tokens[start : start + self.block_size]
            chain.append((foreign_hash(parent, block, salt), parent, block))
            parent = chain[-1][0]
        return chain

    def store(self, tokens: list[int], salt: str) -> list[KVEvent]:
        new = [entry for entry in self.chain(tokens, salt) if entry[0] not in self.blocks]
        self.blocks |= {block_hash: (parent, block, salt) for block_hash, parent, block in new}
        if not new:
            return []
        extra = [(salt,) if salt and parent is None else None for _, parent, _ in new]
        flat = [token for _, _, block in new for token in block]
        return [BlockStored([entry[0] for entry in new], new[0][1], flat, self.block_size, extra_keys=extra)]

    def evict(self, choice: int) -> list[KVEvent]:
        parents = {parent for parent, _, _ in self.blocks.values()}
        leaves = [block_hash for block_hash in self.blocks if block_hash not in parents]
        if not leaves:
            return []
        evicted = leaves[choice % len(leaves)]
        del self.blocks[evicted]
        return [BlockRemoved([evicted])]

    def clear(self) -> list[KVEvent]:
        self.blocks.clear()
        return [AllBlocksCleared()]

    def hit_tokens(self, tokens: list[int], salt: str) -> int:
        stored = 0
        for block_hash, _, _ in self.chain(tokens, salt):
            if block_hash not in self.blocks:
                break
            stored += self.block_size
        return stored // (grain := lcm(BLOCK, self.block_size)) * grain


prompts = st.lists(st.integers(0, 1), min_size=0, max_size=9).map(
    # Few different blocks, so that prompts share prefixes.
    lambda pieces: [piece * 100 + number % 7 for piece in pieces for number in range(32)]
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("store"), prompts, st.sampled_from(["", "tenant"])),
        st.tuples(st.just("evict"), st.integers(0, 99), st.just("")),
        st.tuples(st.just("clear"), st.just(0), st.just("")),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(actions, st.sampled_from([8, 16, 24, 32, 64]), prompts, st.sampled_from(["", "tenant"]))
def test_index_equals_the_endpoints_cache_after_its_events(
    steps: list[tuple[str, object, str]], block_size: int, probe: list[int], probe_salt: str
) -> None:
    index, cache = PrefixIndex(100_000), ForeignCache(block_size)
    seen = [(probe, probe_salt)]
    for kind, value, salt in steps:
        if kind == "store":
            assert isinstance(value, list)
            seen.append((value, salt))
            events = cache.store(value, salt)
        elif kind == "evict":
            assert isinstance(value, int)
            events = cache.evict(value)
        else:
            events = cache.clear()
        assert index.apply("e", events) == 0
    for tokens, salt in seen:
        keys = block_keys(tokens, prompt_root(salt=salt))
        assert index.hit("e", keys, 0.0).blocks * BLOCK == cache.hit_tokens(tokens, salt)
        assert index.hit("other", keys, 0.0).blocks == 0
    index.clear("e")
    assert index.cached_blocks("e") == index._total == 0


def stored(first: int, blocks: int, parent: int | None = None, **fields: object) -> BlockStored:
    tokens = [number % 50 for number in range(first * BLOCK, (first + blocks) * BLOCK)]
    return BlockStored(list(range(first, first + blocks)), parent, tokens, BLOCK, **fields)  # type: ignore[arg-type]


def keys(blocks: int, adapter: str = "", salt: str = "") -> list[bytes]:
    return block_keys([number % 50 for number in range(blocks * BLOCK)], prompt_root(adapter, salt))


def test_an_approximate_hit_counts_until_it_expires_or_is_removed() -> None:
    index = PrefixIndex(1000)
    index.guess("e", keys(4), expires_s=10.0)
    assert index.hit("e", keys(6), 9.9).blocks == 4
    assert index.hit("e", keys(6), 10.0).blocks == 0
    index.apply("e", [stored(0, 4)])
    assert index.hit("e", keys(6), 11.0).blocks == 4
    index.guess("e", keys(4), expires_s=20.0)
    index.apply("e", [BlockRemoved([3])])
    assert index.hit("e", keys(6), 11.0).blocks == 3
    index.guess("e", keys(6), expires_s=20.0)
    while index.expire(20.0):
        pass
    assert index.cached_blocks("e") == index._total == 3


@pytest.mark.parametrize(
    ("event", "adapter", "salt", "blocks"),
    [
        (stored(0, 2, lora_name="fr"), "fr", "", 2),
        (stored(0, 2, lora_name="fr"), "", "", 0),
        (stored(0, 2, lora_name="fr", extra_keys=[("fr", "s"), ("fr",)]), "fr", "s", 2),
        (stored(0, 2, extra_keys=[("s",), None]), "", "s", 2),
        (stored(0, 2, extra_keys=[("s",), None]), "", "", 0),
        (stored(0, 2, extra_keys=[None, ("image",)]), "", "", 1),
        (stored(0, 2, medium="CPU"), "", "", 2),
        (stored(0, 2, medium="TAPE"), "", "", 0),
        (stored(0, 2, group_idx=1), "", "", 0),
        (stored(0, 2, medium="GPU", group_idx=0), "", "", 2),
    ],
)
def test_block_hits_require_the_same_adapter_and_salt(event: BlockStored, adapter: str, salt: str, blocks: int) -> None:
    index = PrefixIndex(1000)
    index.apply("e", [event])
    assert index.hit("e", keys(2, adapter, salt), 0.0).blocks == blocks


def test_a_stored_chain_is_counted_and_ignored_when_its_parent_is_unknown() -> None:
    index = PrefixIndex(1000)
    assert index.apply("e", [stored(1, 2, parent=0)]) == 1
    assert index.cached_blocks("e") == 0


def test_sharers_count_the_chains_below_a_common_prefix() -> None:
    index = PrefixIndex(1000)
    shared = list(range(32))
    chats = [shared + [100 + chat] * 32 for chat in range(3)]
    for chat in chats:
        tokens = block_keys(chat, prompt_root())
        index.apply("e", [BlockStored([int.from_bytes(key[:8], "big") for key in tokens], None, chat, BLOCK)])
    hit = index.hit("e", block_keys(chats[0], prompt_root()), 0.0)
    assert (hit.blocks, hit.shared_blocks, hit.sharers) == (4, 2, 3)


@given(st.integers(20, 200), st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60)), min_size=1, max_size=20))
def test_index_memory_is_bounded_and_its_remaining_entries_are_consistent(
    limit: int, steps: list[tuple[str, int]]
) -> None:
    index = PrefixIndex(limit)
    for number, (name, blocks) in enumerate(steps):
        index.apply(name, [stored(number * 1000, blocks)])
        index.guess(name, [b"%d-%d" % (number, block) for block in range(5)], NEVER)
        assert index._total == sum(holdings.size() for holdings in index._endpoints.values()) <= limit
        for holdings in index._endpoints.values():
            blocks = holdings.blocks
            assert all(blocks.end_of(row)[0] == key for key, row in blocks.owner.items())


def test_unused_chains_are_dropped_first_when_the_index_is_full() -> None:
    index = PrefixIndex(100)
    index.apply("e", [stored(0, 10)])
    index.apply("e", [stored(1000, 85)])
    index.guess("e", keys(10), NEVER)
    index.apply("e", [stored(3000, 30)])
    assert index.hit("e", keys(10), 0.0).blocks == 10


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 40), st.sampled_from([1.0, 3.0]), st.sampled_from([16, 32])),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 40),
)
def test_hits_of_many_endpoints_equal_hits_of_each_alone(
    holdings: list[tuple[int, int, float, int]], blocks: int
) -> None:
    """`holdings`: blocks held, blocks sent in all, when that guess ends (it is 2.0 now), the endpoint's block size."""
    index, prompt, names = PrefixIndex(10_000), keys(40), []
    for number, (stored, sent, expires_s, size) in enumerate(holdings):
        names.append(f"e{number}")
        if stored := stored * BLOCK // size:
            tokens = [number % 50 for number in range(stored * size)]
            index.apply(names[-1], [BlockStored(list(range(stored)), None, tokens, size)])
        if sent:
            index.guess(names[-1], prompt[:sent], expires_s)
    key_chain = KeyChain(prompt[:blocks])
    together = index.hits(names, key_chain, 2.0)
    assert together == [index.hit(name, key_chain, 2.0) for name in names]
    for hit, (stored, sent, expires_s, size) in zip(together, holdings, strict=True):
        step = size // BLOCK
        whole = min(blocks, max(stored - stored % step, sent if expires_s > 2.0 else 0))
        assert hit.blocks in (whole, whole - whole % step)
