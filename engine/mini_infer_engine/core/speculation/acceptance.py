"""Estimates the value of draft tokens: their chance of acceptance, and the tokens a pass makes with them. Pure
arithmetic.
"""

FIRST_ACCEPTANCE = 0.7
"""Acceptance that is assumed before anything is known: high enough to try."""
TYPICAL_WEIGHT = 0.01
"""Weight of a sequence's newest outcome in the acceptance that is assumed for the next sequence."""
_WEIGHT = 0.05
"""Weight of the newest outcome in a sequence's own acceptance."""
_LEAST_CHANCE = 0.1
"""Least chance that a draft token is reached and accepted: below it no token is drafted."""


def draft_levels(most: int) -> tuple[int, ...]:
    """Returns the numbers of draft tokens that a pass may have; each has CUDA graphs of its own."""
    return tuple(sorted({1, min(3, most), most}))


def with_outcome(acceptance: float, drafted: int, accepted: int, weight: float = _WEIGHT) -> float:
    """Returns a row's acceptance after `accepted` of `drafted` tokens; tokens after a rejected one do not count."""
    for right in [True] * accepted + [False] * (accepted < drafted):
        acceptance += weight * (right - acceptance)
    return acceptance


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Returns the expected tokens of a sequence's pass (Leviathan et al., arXiv:2211.17192, equation 1)."""
    if acceptance >= 1.0:
        return drafts + 1.0
    return float((1.0 - acceptance ** (drafts + 1)) / (1.0 - acceptance))


def worthwhile_drafts(acceptance: float, most: int) -> int:
    """Returns the number of draft tokens that have a chance to count."""
    drafts, chance = 0, acceptance
    while drafts < most and chance >= _LEAST_CHANCE:
        drafts, chance = drafts + 1, chance * acceptance
    return drafts
