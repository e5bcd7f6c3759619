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


def test_controller_measures_plain_passes_first_and_then_the_most_drafts() -> None:
    controller = DraftController(5)
    choices = []
    for _ in range(24):
        choices.append(controller.choose([0.9]))
        observe(controller, PassKind(1, choices[-1]), 1.0, 1 + choices[-1])
    assert choices == [0] * 16 + [5] * 8


def test_controller_drafts_when_drafts_cost_almost_nothing() -> None:
    assert controller_with({0: 1.0, 1: 1.01, 3: 1.02, 5: 1.05}).choose([0.8]) == 5


def test_controller_stops_drafting_when_a_batch_would_lose() -> None:
    controller = controller_with({0: 1.0, 1: 1.9, 3: 3.5, 5: 5.5}, rows=128)
    assert controller.choose([0.8] * 128) == 0
    controller_with({0: 1.0, 5: 1.0}, controller=controller)
    assert controller.choose([0.8]) == 5, "what was measured of large batches says little of small ones"


def test_controller_stops_drafting_when_nothing_is_accepted() -> None:
    assert controller_with({0: 1.0, 1: 1.05, 3: 1.1, 5: 1.2}).choose([0.05]) == 0


def test_controller_drafts_less_when_some_rows_have_no_drafts() -> None:
    seconds = {0: 1.0, 1: 1.3, 3: 1.5, 5: 1.7}
    assert controller_with(seconds, rows=8).choose([0.8], num_rows=8) == 0
    assert controller_with(seconds, rows=8).choose([0.8] * 8, num_rows=8) > 0


def test_controller_does_not_draft_when_the_gain_is_within_measurement_error() -> None:
    assert controller_with({0: 1.0, 1: 1.5, 3: 1.85, 5: 2.0}).choose([0.5]) == 0


def test_controller_tries_no_drafts_when_the_device_time_alone_is_too_long() -> None:
    costs = GuessCosts({(8, drafts): 3.0 + drafts for drafts in (1, 3, 5)})
    controller = controller_with({0: 1.0}, rows=8, controller=DraftController(5, costs))
    assert not any(controller.choose([0.9] * 8) for _ in range(1_000))


def test_controller_assumes_costs_of_other_batch_sizes_until_they_are_measured() -> None:
    controller = controller_with({0: 1.0, 1: 3.0, 3: 4.0, 5: 5.0}, rows=8)
    controller_with({0: 1.0}, rows=16, controller=controller)
    assert controller.choose([0.6] * 16) == 0
    fresh = controller_with({0: 1.0}, rows=16)
    assert fresh.choose([0.6] * 16) > 0


def test_controller_ignores_a_single_slow_pass() -> None:
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


def test_controller_tries_drafts_rarely_when_they_lose() -> None:
    choices = simulate({0: 1.0, 1: 9.0, 3: 9.0, 5: 9.0}, 20_000)
    tries = sum(choice > 0 for choice in choices)
    assert tries > 0
    assert 7.0 * tries < 0.01 * len(choices) + 4 + 7, "a guess right brings two tokens: seven seconds are lost"


def test_controller_remeasures_plain_passes_rarely_when_drafts_win() -> None:
    choices = simulate({0: 1.0, 1: 1.1, 3: 1.2, 5: 1.3}, 20_000)
    plain = choices.count(0)
    assert 16 < plain < 0.01 * len(choices)
    assert choices.count(5) > 0.97 * len(choices)


def test_controller_recovers_when_the_first_passes_were_slow() -> None:
    """All that was measured at first took five times as long as such passes do."""
    controller, choices = DraftController(5), list[int]()
    for place in range(1_000):
        choice = 0 if controller.stays_plain(8) else controller.choose([0.6] * 8)
        seconds_taken = 3.5 if choice else 5.0 if place < 20 else 1.0
        observe(controller, PassKind(8, choice), seconds_taken, 8 * expected_tokens(0.6, choice))
        choices.append(choice)
    assert any(choices[:150])
    assert sum(choice > 0 for choice in choices[200:]) < 0.02 * 800


def test_controller_ignores_times_when_passes_of_two_kinds_overlap() -> None:
    controller = controller_with({0: 1.0, 1: 1.0, 3: 1.0, 5: 1.0})
    plain, guessing = PassKind(1, 0), PassKind(1, 5)
    for _ in range(20):
        controller.observe(None, [guessing], 100.0, 1)  # a prompt
        controller.observe(guessing, [guessing], 100.0, 100)
        controller.observe(guessing, [plain], 100.0, 100)
    assert controller.choose([0.9]) == 5


def test_controller_tries_nothing_for_a_while_when_it_rests() -> None:
    controller = controller_with({0: 1.0})
    assert controller.choose([0.9]) == 5
    assert controller.is_trial
    controller.rest()
    assert all(controller.stays_plain(1) for _ in range(500))


def test_controller_stops_drafting_until_its_losses_are_recovered() -> None:
    """Rows are expected to make four tokens and make one, so that each pass with guesses loses time."""
    controller = controller_with({0: 1.0, 1: 2.0, 3: 2.0, 5: 2.0}, rows=8)
    choices = []
    for _ in range(3_000):
        choices.append(0 if controller.stays_plain(8) else controller.choose([0.9] * 8))
        observe(controller, PassKind(8, choices[-1]), 1.0 + (choices[-1] > 0), 8)
    guessed = sum(choice > 0 for choice in choices)
    assert 2 <= guessed <= 4 + 0.01 * 3_000 + 4
    assert not any(choices[20:200])


def test_a_draft_launch_is_charged_to_drafting_when_another_pass_is_committed() -> None:
    controller = controller_with({0: 1.0, 1: 1.1, 3: 1.2, 5: 1.3})
    assert controller.choose([0.9]) == 5
    reading = PassKind(1, 5, read=64)
    controller.observe(PassKind(1, 0), [reading], 40.0, 1)
    assert controller.choose([0.9]) == 0
    observe(controller, reading, 1.3, 4)
    assert all(controller.stays_plain(1) or not controller.choose([0.9]) for _ in range(500))


def test_controller_drafts_only_when_its_credit_covers_the_catch_up() -> None:
    costs = GuessCosts(reading=((16, 30.0), (64, 30.0)))
    controller = controller_with({0: 1.0}, controller=DraftController(5, costs))
    plain_passes = 0
    while controller.stays_plain(1) or not controller.choose([0.9], to_read=lambda: 64):
        observe(controller, PassKind(1, 0), 1.0, 1)
        plain_passes += 1
    assert 3_000 < plain_passes < 5_000, "when 1 % of the time has paid for it"


def test_controller_measures_batches_with_grammars_separately() -> None:
    controller = controller_with({0: 1.0, 1: 1.1, 3: 1.2, 5: 1.3})
    assert controller.choose([0.9], masked=True) == 0, "first what there is to be beaten"
    for drafts in (0, 5, 3, 1):
        observe(controller, PassKind(1, drafts, masked=True), 9.0 if drafts else 1.0, 1, 13)
    assert controller.choose([0.9]) == 5
