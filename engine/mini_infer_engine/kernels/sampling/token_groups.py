"""How a vocabulary is cut for a random choice: first a group of tokens by its mass, then a token of that group.

The cut suits a GPU: a group is what one thread holds of a tile, in runs that it reads at once. It is the same for all
devices, since what a seed gives depends on it.
"""

RUN = 8
"""Tokens in a row: 16 bytes of bf16."""
TOKENS_A_GROUP = 64
GROUPS_A_TILE = 128
"""The runs of a group lie this many runs apart, those of other groups between them."""
