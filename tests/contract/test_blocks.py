import hashlib
import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS, KEY_BYTES, block_keys, root_key
from tests.prompts.conversations import quick

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=100)
repeated = st.lists(st.integers(0, 1), max_size=4).map(lambda bits: [bit for bit in bits for _ in range(250)])
"""Long enough for spans that are remembered, and so few that they come again."""
names = st.text(max_size=5)


def test_block_keys_equal_golden_vectors() -> None:
    # Made with sha256sum and frozen: engine and gateway of different versions meet during every rollout.
    assert root_key("rev").hex() == "05f650511bcbbe814c3c0711fa5055da"
    assert root_key("rev", "lora", "salt").hex() == "77a6b500ddaff0fe000342fed0bdf289"
    keys = block_keys([*range(32), 2**32 - 1], root_key("rev"))
    assert [key.hex() for key in keys] == ["bc6d68186763bebfb41336fc7d9a1d02", "70e5da9caf54f9886ba0b605967d776d"]


@quick
@given(tokens | repeated, st.binary(min_size=16, max_size=16) | st.just(b"p" * 16))
def test_block_keys_equal_their_definition(token_ids: list[int], parent: bytes) -> None:
    keys = block_keys(token_ids, parent)
    assert block_keys(array("I", token_ids), parent) == keys
    assert len(keys) == len(token_ids) // BLOCK_SIZE_TOKENS
    for index, key in enumerate(keys):
        block = token_ids[16 * index : 16 * index + 16]
        parent = hashlib.sha256(parent + struct.pack("<16I", *block)).digest()[:16]
        assert key == parent
        assert len(key) == KEY_BYTES


@quick
@given(tokens, tokens, st.binary(min_size=16, max_size=16))
def test_block_keys_chain_over_all_preceding_tokens(first: list[int], rest: list[int], parent: bytes) -> None:
    first = first[: len(first) // 16 * 16]
    head = block_keys(first, parent)
    tail = block_keys(rest, head[-1] if head else parent)
    assert block_keys(first + rest, parent) == head + tail
    if first and tail:
        other = [first[0] ^ 1, *first[1:]]
        assert block_keys(other + rest, parent)[-1] != tail[-1]


@quick
@given(st.tuples(names, names, names), st.tuples(names, names, names))
def test_root_keys_differ_when_any_input_differs(one: tuple[str, str, str], two: tuple[str, str, str]) -> None:
    assert (root_key(*one) == root_key(*two)) == (one == two)


def test_a_partial_block_has_no_key() -> None:
    assert block_keys(list(range(15)), root_key("")) == []


@pytest.mark.parametrize("wrong", [-1, 2**32])
def test_block_keys_raise_when_a_token_id_is_invalid(wrong: int) -> None:
    with pytest.raises(OverflowError):
        block_keys([wrong] * 16, root_key(""))
