"""Groups of tokens for Gumbel-max sampling in two stages: first a group by its weight, then a token of that group.

Groups suit a GPU: a group is what one thread holds of a tile, in runs that it loads at once. They are the same on all
devices, since what a seed gives depends on them.
"""

RUN_TOKENS = 8
"""Tokens in a row: 16 bytes of bf16."""
GROUP_TOKENS = 64
TILE_GROUPS = 128
"""The runs of a group lie this many runs apart, those of other groups between them."""
