"""Looks up in the prefix index how much of this prompt, and of any prompt, each candidate has cached."""

from collections.abc import Sequence

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS
from mini_infer_gateway.index.prefix_index import NO_HIT, Hit, PrefixIndex
from mini_infer_gateway.routing.base import (
    CACHED_TOKENS,
    DISK_TOKENS,
    HOST_TOKENS,
    SHARED_TOKENS,
    SHARERS,
    STORED_TOKENS,
    Candidate,
    Features,
    PromptKeys,
    RoutingRequest,
)


class PrefixHits:
    """Provides the hit tokens, those of slower tiers and the shared ones among them, and all cached tokens."""

    name = "prefix_hits"
    provides = (CACHED_TOKENS, HOST_TOKENS, DISK_TOKENS, SHARED_TOKENS, SHARERS, STORED_TOKENS)

    def __init__(self, index: PrefixIndex, block_size_tokens: int = BLOCK_SIZE_TOKENS) -> None:
        """`block_size_tokens` is the number of tokens a key; only a simulation differs from the contract."""
        self._index, self._block_size_tokens = index, block_size_tokens

    def produce(self, request: RoutingRequest, candidates: Sequence[Candidate], now_s: float) -> Features:
        """Looks up the hits of each candidate, and converts blocks to tokens."""
        size = self._block_size_tokens
        names = [candidate.name for candidate in candidates]
        hits = self._hits(request, candidates, names, now_s)
        return {
            CACHED_TOKENS: [hit.blocks * size for hit in hits],
            HOST_TOKENS: [hit.host_blocks * size for hit in hits],
            DISK_TOKENS: [hit.disk_blocks * size for hit in hits],
            SHARED_TOKENS: [hit.shared_blocks * size for hit in hits],
            SHARERS: [hit.sharers for hit in hits],
            STORED_TOKENS: [blocks * size for blocks in self._index.all_cached_blocks(names)],
        }

    def _hits(
        self, request: RoutingRequest, candidates: Sequence[Candidate], names: list[str], now_s: float
    ) -> list[Hit]:
        """Looks up hits by revision of the prompt assets: several exist while a rollout changes the tokenizer."""
        revisions = {candidate.assets_revision for candidate in candidates}
        if len(revisions) == 1:
            return self._of_prompt(request.prompts.get(revisions.pop()), names, now_s)
        by_name: dict[str, Hit] = {}
        for revision in revisions:
            own = [candidate.name for candidate in candidates if candidate.assets_revision == revision]
            by_name |= zip(own, self._of_prompt(request.prompts.get(revision), own, now_s), strict=True)
        return [by_name[name] for name in names]

    def _of_prompt(self, prompt: PromptKeys | None, names: Sequence[str], now_s: float) -> list[Hit]:
        if prompt is None:
            return [NO_HIT] * len(names)
        # An engine computes a prompt's last token even where it has all of it, and with it that token's block.
        most = (prompt.tokens - 1) // self._block_size_tokens
        each = [self._index.hits(names, chain, now_s) for chain in prompt.chains]
        if len(each) == 1:
            return [hit.cut(most) for hit in each[0]]
        return [
            Hit(
                sum(hit.blocks for hit in hits),
                sum(hit.shared_blocks for hit in hits),
                max((hit.sharers for hit in hits), default=1),
                sum(hit.host_blocks for hit in hits),
                sum(hit.disk_blocks for hit in hits),
            ).cut(most)
            for hits in zip(*each, strict=True)
        ] or [NO_HIT] * len(names)
