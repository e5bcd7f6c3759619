"""Replaces the placeholder tokens of images by words that tell images apart, for the keys of blocks.

A prompt has one placeholder token for each embedding of an image, the same token for all images. Keys must differ where
images differ, so `blocks.block_keys` hashes words of an image's digest in place of its placeholders.
"""

import sys
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 32
"""Bytes of the SHA-256 digest that names an image: of its encoded file, as it was sent."""


def image_key_ids(digest: bytes, num_tokens: int) -> Sequence[int]:
    """Returns `num_tokens` 32-bit words in place of an image's placeholder tokens: the digest's eight, again and again.

    Raises ValueError if the digest has another length than `DIGEST_BYTES`.
    """
    if len(digest) != DIGEST_BYTES:
        raise ValueError(f"an image's digest has {len(digest)} bytes and must have {DIGEST_BYTES}")
    words = array("I", digest)
    if sys.byteorder == "big":
        words.byteswap()
    return (words * -(-num_tokens // len(words)))[:num_tokens]
