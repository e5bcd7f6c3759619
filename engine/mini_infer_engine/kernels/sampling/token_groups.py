"""Defines groups of tokens for Gumbel-max sampling in two stages: first a group by its weight, then one of its tokens.

Groups suit a GPU: a group is one thread's share of a tile, in runs that it loads at once. They are equal on all
devices, because the result of a seed depends on them.
"""

RUN_TOKENS = 8
"""Tokens in a run: 16 bytes of bf16."""
GROUP_TOKENS = 64
TILE_GROUPS = 128
"""Groups in a tile. The runs of a group are this many runs apart, with those of other groups between them."""
