"""Decides when a sequence loses tokens of its KV cache. Which ones, runners choose: they have keys and queries.

A prompt attends to all of itself and is compressed after its last chunk, as SnapKV does. Policies for which prompt and
output share the budget then evict again each time when the cache has a few tokens more, not at each token, so that
most passes copy nothing. All of this depends on numbers of tokens alone: a sequence that is computed anew after a
preemption loses the same tokens at the same places.
"""

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS
from mini_infer_engine.config.options.kv_policies import KVPolicy
from mini_infer_engine.core.request import Request

NEVER = 1 << 62
"""A number of tokens that no sequence reaches."""

_LEAST_EXCESS, _MOST_EXCESS = 16, 128


def most_excess(budget: int) -> int:
    """Returns the tokens by which a cache exceeds its budget before it is compacted: a sixteenth, within bounds."""
    return min(max(budget // 16, _LEAST_EXCESS), _MOST_EXCESS)


def request_obstacle(request: Request) -> str | None:
    """Returns what of a request does not go with a policy of eviction, as the end of a sentence; None if nothing."""
    if request.beam_search is not None:
        return "beams share the pages of their prompt (use_beam_search)"
    if request.images:
        return "positions of images on a grid are not those of a text"
    return None


def next_compaction(policy: KVPolicy | None, num_prompt: int, num_computed: int, num_evicted: int) -> int:
    """Returns the number of computed tokens at which a sequence with so many loses tokens next, or NEVER."""
    if policy is None:
        return NEVER
    if num_computed < num_prompt and num_prompt > policy.budget:
        return num_prompt
    return num_evicted + policy.budget + most_excess(policy.budget) if policy.evicts_in_decode else NEVER


def chunk_before_compaction(policy: KVPolicy, start: int, count: int, end: int) -> int:
    """Returns how many of the next `count` tokens from `start` on a chunk may have, so that the pass which reaches
    `end`, where the cache is compacted, has all tokens that the policy observes; 0 if it may have none.

    The observed tokens' chunk begins with a block, as chunks after a cached prefix do.
    """
    if policy.num_observed == 1 or start + count >= end:
        return min(count, end - start)
    first = (end - policy.num_observed) // BLOCK_SIZE_TOKENS * BLOCK_SIZE_TOKENS
    return max(0, min(count, first - start))
