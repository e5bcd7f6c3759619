"""Words in place of placeholder tokens: different images have different block keys, wherever a block begins."""

import hashlib

import pytest

from mini_infer_contract.blocks import block_keys, root_key
from mini_infer_contract.images import image_key_ids

CAT, DOG = (hashlib.sha256(name).digest() for name in (b"cat", b"dog"))


@pytest.mark.parametrize("text_before", range(9))
def test_blocks_differ_when_a_block_has_eight_tokens_of_another_image(text_before: int) -> None:
    cat, dog = ([5] * text_before + list(image_key_ids(digest, 40)) for digest in (CAT, DOG))
    assert not set(block_keys(cat, root_key("m"))) & set(block_keys(dog, root_key("m")))


def test_the_words_are_those_of_the_digest_when_packed_again() -> None:
    assert bytes(image_key_ids(CAT, 8)) == CAT
    assert list(image_key_ids(CAT, 11)) == [*image_key_ids(CAT, 8), *image_key_ids(CAT, 3)]


def test_a_digest_is_refused_when_it_has_another_length() -> None:
    with pytest.raises(ValueError, match="32"):
        image_key_ids(b"short", 4)
