"""Hashes prompt tokens into a chain of block keys, the same on every side that caches or routes by prefix.

A key names sixteen tokens and everything before them, so that equal keys mean equal KV cache. This file knows nothing
of pages, pods or events.
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache

BLOCK_SIZE_TOKENS = 16
"""Tokens a block: the granularity at which prefixes are shared, whatever the page size of an engine."""

KEY_BYTES = 16

_BLOCK_BYTES = 4 * BLOCK_SIZE_TOKENS
SPAN_SIZE_TOKENS = 16 * BLOCK_SIZE_TOKENS
"""Tokens whose keys are cached together."""

_SPAN_BYTES = 4 * SPAN_SIZE_TOKENS
_CACHED_ROOTS = 1024
_CACHED_SPANS = 4096
"""Most cached spans: a million tokens, in about 9 MB."""


@lru_cache(maxsize=_CACHED_ROOTS)
def root_key(model_revision: str, adapter: str = "", salt: str = "") -> bytes:
    """Returns the parent of a prompt's first block: 16 bytes that differ wherever KV cache must not be shared.

    `adapter` is the LoRA adapter's name, `salt` the tenant's cache salt; both empty means shared by all.
    """
    parts = (part.encode("utf-8", "surrogatepass") for part in (model_revision, adapter, salt))
    return hashlib.sha256(b"".join(len(part).to_bytes(4, "little") + part for part in parts)).digest()[:KEY_BYTES]


def block_keys(token_ids: Sequence[int], parent: bytes) -> list[bytes]:
    """Returns the keys of all full blocks of `token_ids`, in order, chained from `parent`; a partial last block has
    none.

    A block's key is sha256(parent[16] || 16 x u32 little-endian)[:16]. The tokens of an `array("I")` are not looked at
    one by one. A beginning that many prompts share is hashed once: looking 256 tokens up costs a sixteenth of hashing
    them.
    """
    packed = _packed(token_ids[: len(token_ids) - len(token_ids) % BLOCK_SIZE_TOKENS])
    whole_spans = len(packed) - len(packed) % _SPAN_BYTES
    keys: list[bytes] = []
    for start in range(0, whole_spans, _SPAN_BYTES):
        keys += _keys_of_span(packed[start : start + _SPAN_BYTES], keys[-1] if keys else parent)
    return keys + _chain(packed[whole_spans:], keys[-1] if keys else parent)


def _packed(token_ids: Sequence[int]) -> bytes:
    """Packs token ids into four bytes each, little-endian. Raises OverflowError if one does not fit."""
    words = array("I", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


@lru_cache(maxsize=_CACHED_SPANS)
def _keys_of_span(packed: bytes, parent: bytes) -> tuple[bytes, ...]:
    return tuple(_chain(packed, parent))


def _chain(packed: bytes, parent: bytes) -> list[bytes]:
    sha256 = hashlib.sha256
    keys = []
    for start in range(0, len(packed), _BLOCK_BYTES):
        parent = sha256(parent + packed[start : start + _BLOCK_BYTES]).digest()[:KEY_BYTES]
        keys.append(parent)
    return keys
