"""A chain reads like the list that it was made of."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer_gateway.index.key_chain import CHUNK_KEYS, KeyChain, ListedKeys, Probes, deepest


def keys(first: int, count: int) -> list[bytes]:
    return [b"%016d" % number for number in range(first, first + count)]


@given(
    st.lists(st.tuples(st.integers(0, 3 * CHUNK_KEYS), st.floats(0, 1)), max_size=5),
    st.slices(3 * CHUNK_KEYS),
)
def test_it_grows_and_is_cut_like_a_list(rounds: list[tuple[int, float]], part: slice) -> None:
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


@given(st.integers(0, 60), st.integers(1, 3), st.data())
def test_the_deepest_is_found_in_any_form_of_keys(count: int, step: int, data: st.DataObject) -> None:
    chain = KeyChain(keys(0, count))
    high = data.draw(st.integers(0, count // step))
    low = data.draw(st.integers(0, high))
    held = data.draw(st.integers(low, high))
    known = set(keys(0, held * step))
    for form in (chain, Probes(chain), ListedKeys(chain)):
        assert deepest(form, known.__contains__, low, high, step) == held
