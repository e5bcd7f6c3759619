"""What guesses are worth: the chance that they are right, and the tokens that a pass makes by them. Pure arithmetic."""

FIRST_ACCEPTANCE = 0.7
"""Assumed before anything is known: high enough to try."""
TYPICAL_WEIGHT = 0.01
"""Of a sequence's newest outcome in what is assumed of the next sequence."""
_WEIGHT = 0.05
"""Of the newest outcome in a sequence's own acceptance."""
_LEAST_CHANCE = 0.1
"""That a guess is reached and right, for it to be made at all."""


def draft_levels(most: int) -> tuple[int, ...]:
    """The numbers of guesses that a pass may have; each has CUDA graphs of its own."""
    return tuple(sorted({1, min(3, most), most}))


def with_outcome(acceptance: float, drafted: int, accepted: int, weight: float = _WEIGHT) -> float:
    """A row's chance that a guess is right, after `accepted` of `drafted` were; those behind a wrong one are moot."""
    for right in [True] * accepted + [False] * (accepted < drafted):
        acceptance += weight * (right - acceptance)
    return acceptance


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Tokens that a pass makes of a sequence (Leviathan et al., arXiv:2211.17192, equation 1)."""
    if acceptance >= 1.0:
        return drafts + 1.0
    return float((1.0 - acceptance ** (drafts + 1)) / (1.0 - acceptance))


def worthwhile_drafts(acceptance: float, most: int) -> int:
    """Guesses of a sequence that have a chance to count."""
    drafts, chance = 0, acceptance
    while drafts < most and chance >= _LEAST_CHANCE:
        drafts, chance = drafts + 1, chance * acceptance
    return drafts
