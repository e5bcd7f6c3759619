"""How many tokens a pass guesses: pure arithmetic on acceptances and measured seconds."""

import math

from mini_infer_engine.core.speculation.acceptance import expected_tokens
from mini_infer_engine.core.speculation.controller import DraftController
from mini_infer_engine.core.speculation.pass_times import GuessCosts, PassKind


def observe(controller: DraftController, kind: PassKind, seconds: float, tokens: float, count: int = 1) -> None:
    """Passes of one kind, one after the other: the next is launched while one computes."""
    for _ in range(count):
        controller.observe(kind, [kind], seconds, round(tokens))


def controller_with(
    seconds: dict[int, float], rows: int = 1, most: int = 5, controller: DraftController | None = None
) -> DraftController:
    """One that has measured passes so, by guesses, which have lost nothing."""
    controller = controller or DraftController(most)
    for drafts, seconds_taken in seconds.items():
        observe(controller, PassKind(rows, drafts), seconds_taken, math.ceil(rows * seconds_taken / seconds[0]), 13)
    return controller


def test_what_there_is_to_be_beaten_is_measured_first_then_the_most_guesses() -> None:
    controller = DraftController(5)
    choices = []
    for _ in range(24):
        choices.append(controller.choose([0.9]))
        observe(controller, PassKind(1, choices[-1]), 1.0, 1 + choices[-1])
    assert choices == [0] * 16 + [5] * 8


def test_guesses_that_cost_next_to_nothing_are_made() -> None:
    assert controller_with({0: 1.0, 1: 1.01, 3: 1.02, 5: 1.05}).choose([0.8]) == 5


def test_speculation_leaves_a_batch_where_it_would_lose() -> None:
    controller = controller_with({0: 1.0, 1: 1.9, 3: 3.5, 5: 5.5}, rows=128)
    assert controller.choose([0.8] * 128) == 0
    controller_with({0: 1.0, 5: 1.0}, controller=controller)
    assert controller.choose([0.8]) == 5, "what was measured of large batches says little of small ones"


def test_it_leaves_where_nothing_is_accepted() -> None:
    assert controller_with({0: 1.0, 1: 1.05, 3: 1.1, 5: 1.2}).choose([0.05]) == 0


def test_rows_that_guess_nothing_make_guessing_worth_less() -> None:
    seconds = {0: 1.0, 1: 1.3, 3: 1.5, 5: 1.7}
    assert controller_with(seconds, rows=8).choose([0.8], num_rows=8) == 0
    assert controller_with(seconds, rows=8).choose([0.8] * 8, num_rows=8) > 0


def test_a_gain_that_may_be_an_error_of_measurement_is_none() -> None:
    assert controller_with({0: 1.0, 1: 1.5, 3: 1.85, 5: 2.0}).choose([0.5]) == 0


def test_where_the_device_alone_takes_too_long_nothing_is_tried() -> None:
    costs = GuessCosts({(8, drafts): 3.0 + drafts for drafts in (1, 3, 5)})
    controller = controller_with({0: 1.0}, rows=8, controller=DraftController(5, costs))
    assert not any(controller.choose([0.9] * 8) for _ in range(1_000))


def test_what_other_sizes_of_batch_have_shown_makes_guesses_dear_until_they_are_measured() -> None:
    controller = controller_with({0: 1.0, 1: 3.0, 3: 4.0, 5: 5.0}, rows=8)
    controller_with({0: 1.0}, rows=16, controller=controller)
    assert controller.choose([0.6] * 16) == 0
    fresh = controller_with({0: 1.0}, rows=16)
    assert fresh.choose([0.6] * 16) > 0


def test_one_pass_that_was_held_up_is_forgiven() -> None:
    controller = controller_with({0: 1.0, 1: 1.05, 3: 1.1, 5: 1.2})
    observe(controller, PassKind(1, 5), 50.0, 4)
    observe(controller, PassKind(1, 5), 1.2, 4, 10)
    assert controller.choose([0.9]) == 5


def simulate(costs: dict[int, float], passes: int, accepted: float = 0.9) -> list[int]:
    """The choices for one sequence whose guesses are right so often, where passes take so long."""
    controller, choices = DraftController(5), list[int]()
    for _ in range(passes):
        choice = 0 if controller.stays_plain(1) else controller.choose([0.9])
        observe(controller, PassKind(1, choice), costs[choice], round(expected_tokens(accepted, choice)))
        choices.append(choice)
    return choices


def test_where_guessing_loses_it_is_tried_hardly_ever() -> None:
    choices = simulate({0: 1.0, 1: 9.0, 3: 9.0, 5: 9.0}, 20_000)
    tries = sum(choice > 0 for choice in choices)
    assert tries > 0
    assert 7.0 * tries < 0.01 * len(choices) + 4 + 7, "a guess right brings two tokens: seven seconds are lost"


def test_where_guessing_wins_what_there_is_to_be_beaten_is_measured_again_now_and_then() -> None:
    choices = simulate({0: 1.0, 1: 1.1, 3: 1.2, 5: 1.3}, 20_000)
    plain = choices.count(0)
    assert 16 < plain < 0.01 * len(choices)
    assert choices.count(5) > 0.97 * len(choices)


def test_first_passes_that_were_slow_are_found_out() -> None:
    """All that was measured at first took five times as long as such passes do."""
    controller, choices = DraftController(5), list[int]()
    for place in range(1_000):
        choice = 0 if controller.stays_plain(8) else controller.choose([0.6] * 8)
        seconds_taken = 3.5 if choice else 5.0 if place < 20 else 1.0
        observe(controller, PassKind(8, choice), seconds_taken, 8 * expected_tokens(0.6, choice))
        choices.append(choice)
    assert any(choices[:150])
    assert sum(choice > 0 for choice in choices[200:]) < 0.02 * 800


def test_time_that_another_kind_of_pass_has_a_part_in_is_not_measured() -> None:
    controller = controller_with({0: 1.0, 1: 1.0, 3: 1.0, 5: 1.0})
    plain, guessing = PassKind(1, 0), PassKind(1, 5)
    for _ in range(20):
        controller.observe(None, [guessing], 100.0, 1)  # a prompt
        controller.observe(guessing, [guessing], 100.0, 100)
        controller.observe(guessing, [plain], 100.0, 100)
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
        observe(controller, PassKind(8, choices[-1]), 1.0 + (choices[-1] > 0), 8)
    guessed = sum(choice > 0 for choice in choices)
    assert 2 <= guessed <= 4 + 0.01 * 3_000 + 4
    assert not any(choices[20:200])


def test_the_launch_of_guesses_is_charged_to_them_though_another_pass_is_committed_then() -> None:
    controller = controller_with({0: 1.0, 1: 1.1, 3: 1.2, 5: 1.3})
    assert controller.choose([0.9]) == 5
    reading = PassKind(1, 5, read=64)
    controller.observe(PassKind(1, 0), [reading], 40.0, 1)
    assert controller.choose([0.9]) == 0
    observe(controller, reading, 1.3, 4)
    assert all(controller.stays_plain(1) or not controller.choose([0.9]) for _ in range(500))


def test_what_a_draft_must_read_has_to_be_on_the_account() -> None:
    costs = GuessCosts(reading=((16, 30.0), (64, 30.0)))
    controller = controller_with({0: 1.0}, controller=DraftController(5, costs))
    plain_passes = 0
    while controller.stays_plain(1) or not controller.choose([0.9], to_read=lambda: 64):
        observe(controller, PassKind(1, 0), 1.0, 1)
        plain_passes += 1
    assert 3_000 < plain_passes < 5_000, "when 1 % of the time has paid for it"


def test_batches_within_grammars_are_measured_apart() -> None:
    controller = controller_with({0: 1.0, 1: 1.1, 3: 1.2, 5: 1.3})
    assert controller.choose([0.9], masked=True) == 0, "first what there is to be beaten"
    for drafts in (0, 5, 3, 1):
        observe(controller, PassKind(1, drafts, masked=True), 9.0 if drafts else 1.0, 1, 13)
    assert controller.choose([0.9]) == 5
