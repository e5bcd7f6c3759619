"""A chain reads like the list that it was made of."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer_gateway.index.key_chain import CHUNK_KEYS, FEW_BISECTIONS, KeyChain, Lookup


def keys(first: int, count: int) -> list[bytes]:
    return [b"%016d" % number for number in range(first, first + count)]


@given(
    st.lists(st.tuples(st.integers(0, 3 * CHUNK_KEYS), st.floats(0, 1)), max_size=5),
    st.slices(3 * CHUNK_KEYS),
)
def test_key_chain_behaves_like_a_list_when_it_grows_and_is_cut(rounds: list[tuple[int, float]], part: slice) -> None:
    chain, expected = KeyChain([]), list[bytes]()
    for number, (count, kept) in enumerate(rounds):
        blocks, new = int(kept * len(expected)), keys(10_000 * number, count)
        before = list(chain)
        grown = KeyChain(new, chain, blocks)
        assert list(chain) == before, "what others have stays as it is"
        chain, expected = grown, expected[:blocks] + new
        assert list(chain) == expected
        assert len(chain) == len(expected)
        assert chain[part] == expected[part]
    for position in (-1, 0, len(expected) - 1):
        if expected:
            assert chain[position] == expected[position]
    for position in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError):
            chain[position]


@given(st.integers(0, 3 * CHUNK_KEYS), st.booleans(), st.data())
def test_lookup_finds_the_deepest_stored_block_of_each_endpoint(count: int, packed: bool, data: st.DataObject) -> None:
    """Whatever those before held, and whether all have runs of the same length."""
    listed = keys(0, count)
    lookup = Lookup(KeyChain(listed) if packed else listed)
    assert [lookup.last_of(blocks) for blocks in range(1, count + 1)] == listed
    for step in data.draw(st.lists(st.integers(1, 3), max_size=2 * FEW_BISECTIONS)):
        high = data.draw(st.integers(0, count // step))
        low = data.draw(st.integers(0, high))
        stored = data.draw(st.integers(low, high))
        known = set(listed[: stored * step])
        assert lookup.deepest(known.__contains__, low, high, step) == stored
