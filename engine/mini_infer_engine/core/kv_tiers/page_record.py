"""Defines the record of a page in a tier: which tokens it has, and the digest of its bytes.

A recurrent state after a prefix is one part or several, each of which takes a page of a tier.
"""

from collections.abc import Sequence

import msgspec

from mini_infer_engine.core.prefix_cache import Block

_STATE = b"state"
_WORD_BYTES = 8


class PageRecord(msgspec.Struct, eq=False, frozen=True, gc=False):
    """A whole page of a prefix in some tier, or a part of the recurrent state after one."""

    blocks: tuple[Block, ...]
    """The page's blocks in order; their keys, parents, tokens and salts alone are read. A part of a state has none."""
    digest: int
    """The sealed digest of its bytes; of a state, the digest of all its parts."""
    part_key: bytes = b""
    """The key of a part of a state; empty for a page."""

    @property
    def key(self) -> bytes:
        """The key of its last block, which names all tokens up to the page's end, or that of a part of a state."""
        return self.part_key or page_key(self.blocks)

    @property
    def is_reported(self) -> bool:
        """True if others hear of its blocks: those of the first KV group."""
        return bool(self.blocks) and not self.blocks[0].group


def page_key(blocks: Sequence[Block]) -> bytes:
    """Returns the key of a page with these blocks."""
    return group_key(blocks[-1].key, blocks[-1].group)


def group_key(key: bytes, group: int) -> bytes:
    """Returns the key of a KV group's page whose last block has this key."""
    return key + bytes((group,)) if group else key


def state_key(key: bytes) -> bytes:
    """Returns the key of the first part of the state after the prefix that `key` names."""
    return key + _STATE


def state_records(key: bytes, digest: int, count: int) -> list[PageRecord]:
    """Returns the records of a state's parts, by its sealed digest.

    The digest is in the keys of all parts but the first: parts of states that were computed twice, which may differ by
    rounding, never come together.
    """
    return [PageRecord((), digest, part_key) for part_key in (state_key(key), *later_part_keys(key, digest, count))]


def later_part_keys(key: bytes, digest: int, count: int) -> Sequence[bytes]:
    """Returns the keys of a state's parts after the first, of `count` in all."""
    stem = state_key(key) + digest.to_bytes(_WORD_BYTES, "little")
    return [stem + place.to_bytes(_WORD_BYTES, "little") for place in range(1, count)]
