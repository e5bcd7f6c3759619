"""Asks the prefix index how much of this prompt, and of anything, each candidate holds."""

from collections.abc import Sequence

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS
from mini_infer_gateway.index.prefix_index import NO_HIT, Hit, PrefixIndex
from mini_infer_gateway.routing.base import (
    CACHED_TOKENS,
    HELD_TOKENS,
    SHARED_TOKENS,
    SHARERS,
    Candidate,
    Facts,
    RoutingRequest,
)


class PrefixHits:
    """Hit tokens, which of them are shared, and what is held in all."""

    name = "prefix_hits"
    provides = (CACHED_TOKENS, SHARED_TOKENS, SHARERS, HELD_TOKENS)

    def __init__(self, index: PrefixIndex, block_size_tokens: int = BLOCK_SIZE_TOKENS) -> None:
        """`block_size_tokens`: what a key stands for; only a simulation has other than the contract's blocks."""
        self._index, self._block_size_tokens = index, block_size_tokens

    def produce(self, request: RoutingRequest, candidates: Sequence[Candidate], now_s: float) -> Facts:
        """See base.Producer."""
        size = self._block_size_tokens
        hits = [self._hit(request, candidate, now_s) for candidate in candidates]
        names = [candidate.endpoint.name for candidate in candidates]
        return {
            CACHED_TOKENS: [float(hit.blocks * size) for hit in hits],
            SHARED_TOKENS: [float(hit.shared_blocks * size) for hit in hits],
            SHARERS: [float(hit.sharers) for hit in hits],
            HELD_TOKENS: [float(self._index.held_blocks(name) * size) for name in names],
        }

    def _hit(self, request: RoutingRequest, candidate: Candidate, now_s: float) -> Hit:
        prompt = request.prompts.get(candidate.assets_revision)
        if prompt is None:
            return NO_HIT
        hits = [self._index.hit(candidate.endpoint.name, chain, now_s) for chain in prompt.chains]
        # An engine computes a prompt's last token even where it has all of it, and with it that token's block.
        most = (prompt.tokens - 1) // self._block_size_tokens
        return Hit(
            min(most, sum(hit.blocks for hit in hits)),
            sum(hit.shared_blocks for hit in hits),
            max((hit.sharers for hit in hits), default=1),
        )
