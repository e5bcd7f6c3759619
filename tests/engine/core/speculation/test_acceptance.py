"""What guesses are worth, as tables."""

import pytest

from mini_infer_engine.core.speculation.acceptance import draft_levels, expected_tokens, with_outcome, worthwhile_drafts


@pytest.mark.parametrize(("most", "levels"), [(1, (1,)), (2, (1, 2)), (3, (1, 3)), (5, (1, 3, 5)), (7, (1, 3, 7))])
def test_draft_levels_end_at_the_allowed_maximum(most: int, levels: tuple[int, ...]) -> None:
    assert draft_levels(most) == levels


def test_expected_tokens_of_a_draft_chain_by_acceptance() -> None:
    assert expected_tokens(0.0, 4) == 1
    assert expected_tokens(1.0, 4) == 5
    assert expected_tokens(0.5, 2) == pytest.approx(1 + 0.5 + 0.25)


def test_acceptance_estimate_follows_outcomes() -> None:
    value = 0.7
    for _ in range(100):
        value = with_outcome(value, 4, 4)
    assert value > 0.98
    for _ in range(100):
        value = with_outcome(value, 4, 0)
    assert value < 0.02


def test_acceptance_ignores_drafts_behind_a_rejected_one() -> None:
    assert with_outcome(0.5, 5, 1) == with_outcome(with_outcome(0.5, 1, 1), 1, 0)


@pytest.mark.parametrize(("acceptance", "drafts"), [(0.05, 0), (0.3, 1), (0.4, 2), (0.6, 4), (0.99, 5)])
def test_worthwhile_drafts_by_acceptance(acceptance: float, drafts: int) -> None:
    assert worthwhile_drafts(acceptance, 5) == drafts
