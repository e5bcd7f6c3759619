"""Encodes the header of a page on the disk: its tokens and keys, the digest of its bytes, and a checksum of its own."""

import struct
import zlib
from itertools import pairwise

import msgspec

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS, KEY_BYTES
from mini_infer_engine.core.kv_tiers.page_record import PageRecord
from mini_infer_engine.core.prefix_cache import Block

_MAGIC = b"MIKV0001"
_PREFIX = struct.Struct("<8sII")
"""Magic number, length and CRC-32 of the content."""
_DIGESTS, _GROUPS = 1 << 64, 1 << 8
"""Headers that others write to a folder or a pool may have a right checksum, and numbers that no page has."""


class _Content(msgspec.Struct, array_like=True):
    digest: int
    parent: bytes | None
    keys: bytes
    """The keys of the page's blocks, or the key of a part of a recurrent state, which has no tokens."""
    tokens: bytes
    salt: str
    group: int


def encode_header(record: PageRecord) -> bytes:
    """Returns the header of a page."""
    content = msgspec.msgpack.encode(_content(record))
    return _PREFIX.pack(_MAGIC, len(content), zlib.crc32(content)) + content


def _content(record: PageRecord) -> _Content:
    if record.part_key:
        return _Content(record.digest, None, record.part_key, b"", "", 0)
    first = record.blocks[0]
    keys = b"".join(block.key for block in record.blocks)
    tokens = b"".join(block.packed_tokens for block in record.blocks)
    return _Content(record.digest, first.parent, keys, tokens, first.salt, first.group)


def decode_header(data: bytes) -> PageRecord | None:
    """Returns the record of a header, or None if these bytes are none: empty, torn or changed."""
    if len(data) < _PREFIX.size:
        return None
    magic, length, checksum = _PREFIX.unpack_from(data)
    content = data[_PREFIX.size : _PREFIX.size + length]
    if magic != _MAGIC or len(content) != length or zlib.crc32(content) != checksum:
        return None
    try:
        read = msgspec.msgpack.decode(content, type=_Content)
    except msgspec.MsgspecError:
        return None
    if not 0 <= read.digest < _DIGESTS or not 0 <= read.group < _GROUPS:
        return None
    if read.keys and not read.tokens:
        return PageRecord((), read.digest, read.keys)
    count, size = len(read.keys) // KEY_BYTES, 4 * BLOCK_SIZE_TOKENS
    if not count or (len(read.keys), len(read.tokens)) != (count * KEY_BYTES, count * size):
        return None
    keys = [read.keys[start : start + KEY_BYTES] for start in range(0, len(read.keys), KEY_BYTES)]
    tokens = [read.tokens[start : start + size] for start in range(0, len(read.tokens), size)]
    parents = [read.parent, *(parent for parent, _ in pairwise(keys))]
    blocks = zip(keys, parents, tokens, strict=True)
    return PageRecord(
        tuple(Block(read.group, key, parent, own, read.salt, []) for key, parent, own in blocks), read.digest
    )
