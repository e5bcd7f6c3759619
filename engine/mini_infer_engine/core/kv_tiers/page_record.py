"""Defines the record of a page in a tier: which tokens it has, and the digest of its bytes."""

import msgspec

from mini_infer_engine.core.prefix_cache import Block


class PageRecord(msgspec.Struct, eq=False, frozen=True, gc=False):
    """A whole page of a prefix in some tier."""

    blocks: tuple[Block, ...]
    """The page's blocks in order; their keys, parents, tokens and salts alone are read."""
    digest: int
    """The sealed digest of its bytes."""

    @property
    def key(self) -> bytes:
        """The key of its last block, which names all tokens up to the page's end."""
        return self.blocks[-1].key
