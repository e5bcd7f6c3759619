"""How many tokens a pass guesses: pure arithmetic on acceptances and measured seconds."""

import pytest

from mini_infer_engine.speculation.controller import (
    DraftController,
    draft_levels,
    expected_tokens,
    with_outcome,
    worthwhile_drafts,
)


def controller_with(costs: dict[int, float], rows: int = 1, most: int = 5) -> DraftController:
    controller = DraftController(most)
    for drafts, seconds in costs.items():
        for _ in range(2):  # the first of its kind may have waited for another
            controller.observe(rows, drafts, seconds)
    return controller


@pytest.mark.parametrize(("most", "levels"), [(1, (1,)), (2, (1, 2)), (3, (1, 3)), (5, (1, 3, 5)), (7, (1, 3, 7))])
def test_levels_end_at_the_most_that_is_allowed(most: int, levels: tuple[int, ...]) -> None:
    assert draft_levels(most) == levels


def test_the_expected_tokens_are_those_of_a_chain_that_ends_at_its_first_wrong_guess() -> None:
    assert expected_tokens(0.0, 4) == 1
    assert expected_tokens(1.0, 4) == 5
    assert expected_tokens(0.5, 2) == pytest.approx(1 + 0.5 + 0.25)


def test_acceptance_follows_what_happens() -> None:
    value = 0.7
    for _ in range(100):
        value = with_outcome(value, 4, 4)
    assert value > 0.98
    for _ in range(100):
        value = with_outcome(value, 4, 0)
    assert value < 0.02


def test_guesses_behind_a_wrong_one_count_for_nothing() -> None:
    assert with_outcome(0.5, 5, 1) == with_outcome(with_outcome(0.5, 1, 1), 1, 0)


@pytest.mark.parametrize(("acceptance", "drafts"), [(0.05, 0), (0.3, 1), (0.4, 2), (0.6, 4), (0.99, 5)])
def test_a_sequence_guesses_as_far_as_there_is_a_chance(acceptance: float, drafts: int) -> None:
    assert worthwhile_drafts(acceptance, 5) == drafts


def test_what_there_is_to_be_beaten_is_measured_first_then_the_most_guesses() -> None:
    controller = DraftController(5)
    choices = []
    for _ in range(16):
        choices.append(controller.choose([0.9]))
        controller.observe(1, choices[-1], 1.0)
    assert choices == [0] * 8 + [5] * 8


def test_guesses_that_cost_next_to_nothing_are_made() -> None:
    assert controller_with({0: 1.0, 1: 1.01, 3: 1.02, 5: 1.05}).choose([0.8]) == 5


def test_speculation_leaves_a_batch_where_it_would_lose() -> None:
    controller = controller_with({0: 1.0, 1: 1.9, 3: 3.5, 5: 5.5}, rows=128)
    assert controller.choose([0.8] * 128) == 0
    for drafts in (0, 0, 5, 5):
        controller.observe(1, drafts, 1.0)
    assert controller.choose([0.8]) == 5, "what was measured of large batches says nothing of small ones"


def test_it_leaves_where_nothing_is_accepted() -> None:
    assert controller_with({0: 1.0, 1: 1.05, 3: 1.1, 5: 1.2}).choose([0.05]) == 0


def test_rows_that_guess_nothing_make_guessing_worth_less() -> None:
    controller = controller_with({0: 1.0, 1: 1.3, 3: 1.5, 5: 1.7}, rows=8)
    assert controller.choose([0.8], num_rows=8) == 0
    controller = controller_with({0: 1.0, 1: 1.3, 3: 1.5, 5: 1.7}, rows=8)
    assert controller.choose([0.8] * 8, num_rows=8) > 0


def test_a_gain_that_may_be_an_error_of_measurement_is_none() -> None:
    assert controller_with({0: 1.0, 1: 1.5, 3: 1.85, 5: 2.0}).choose([0.5]) == 0


def test_one_pass_that_was_held_up_is_forgiven() -> None:
    controller = controller_with({0: 1.0, 1: 1.05, 3: 1.1, 5: 1.2})
    controller.observe(1, 5, 50.0)
    for _ in range(10):
        controller.observe(1, 5, 1.2)
    assert controller.choose([0.9]) == 5


def simulate(costs: dict[int, float], passes: int) -> list[int]:
    """The choices for one sequence of acceptance 0.9, where passes take so long."""
    controller, choices = DraftController(5), list[int]()
    for _ in range(passes):
        choice = 0 if controller.stays_plain(1) else controller.choose([0.9])
        controller.observe(1, choice, costs[choice], round(expected_tokens(0.9, choice)))
        choices.append(choice)
    return choices


def test_where_guessing_loses_it_is_tried_hardly_ever() -> None:
    choices = simulate({0: 1.0, 1: 9.0, 3: 9.0, 5: 9.0}, 20_000)
    tries = sum(choice > 0 for choice in choices)
    assert 0 < tries < 0.005 * len(choices)
    assert 7.0 * tries < 0.01 * len(choices) + 32 + 7, (
        "a guess right brings two tokens: seven seconds are lost each time"
    )


def test_where_guessing_wins_what_it_wins_is_measured_again_now_and_then() -> None:
    choices = simulate({0: 1.0, 1: 1.1, 3: 1.2, 5: 1.3}, 20_000)
    plain = choices.count(0)
    assert 8 < plain < 0.01 * len(choices)
    assert choices.count(5) > 0.97 * len(choices)


def test_a_pass_after_another_kind_is_not_measured() -> None:
    controller = controller_with({0: 1.0, 1: 1.0, 3: 1.0, 5: 1.0})
    for _ in range(20):
        controller.interrupt()
        controller.observe(1, 5, 100.0)
    assert controller.choose([0.9]) == 5


def test_who_rests_tries_nothing_for_a_while() -> None:
    controller = controller_with({0: 1.0})
    assert controller.choose([0.9]) == 5
    assert controller.is_trial
    controller.rest()
    assert all(controller.stays_plain(1) for _ in range(500))


def test_what_is_lost_is_charged_and_then_nothing_is_guessed_until_it_is_made_good() -> None:
    """Rows are expected to make four tokens and make one, so that each pass with guesses loses time."""
    controller = controller_with({0: 1.0, 1: 2.0, 3: 2.0, 5: 2.0}, rows=8)
    choices = []
    for _ in range(3_000):
        choices.append(0 if controller.stays_plain(8) else controller.choose([0.9] * 8))
        controller.observe(8, choices[-1], 1.0 + (choices[-1] > 0), 8)
    guessed = sum(choice > 0 for choice in choices)
    assert 8 <= guessed <= 32 + 0.01 * 3_000 + 8
    assert not any(choices[1_000:1_500])


def test_what_a_draft_reads_is_charged_and_is_no_measurement() -> None:
    controller = controller_with({0: 1.0, 1: 1.1, 3: 1.2, 5: 1.3})
    assert controller.choose([0.9]) == 5
    controller.observe(1, 5, 40.0, 4, caught_up=True)
    assert controller.choose([0.9]) == 0
    for _ in range(4_000):
        controller.observe(1, 0, 1.0)
        controller.stays_plain(1)
    assert controller.choose([0.9]) == 5, "what such a pass takes is as it was"


def test_batches_within_grammars_are_measured_apart() -> None:
    controller = controller_with({0: 1.0, 1: 1.1, 3: 1.2, 5: 1.3})
    assert controller.choose([0.9], masked=True) == 0, "first what there is to be beaten"
    for drafts, seconds in ((0, 1.0), (0, 1.0), (5, 9.0), (5, 9.0), (3, 9.0), (3, 9.0), (1, 9.0), (1, 9.0)):
        controller.observe(1, drafts, seconds, masked=True)
    controller = controller_with({0: 1.0, 1: 1.1, 3: 1.2, 5: 1.3})
    assert controller.choose([0.9]) == 5
