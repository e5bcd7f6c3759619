"""OpenAI's service tiers as priorities: a request names a tier, and the lower priority goes first."""

from typing import Final

SERVICE_TIER_PRIORITIES: Final = {"priority": -1, "fast": -1, "flex": 1}
"""The priority of each tier that has one; all others, such as `auto` and `default`, have 0."""
