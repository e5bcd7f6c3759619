"""The account of what guessing has won and lost in batches of one size."""

import pytest

from mini_infer_engine.core.speculation.batch_account import CREDIT, BatchAccount


def known_account(plain_s: float = 1.0) -> BatchAccount:
    account = BatchAccount()
    account.measure(0, 12 * plain_s, 12, reading_s=0.0, passes=12)
    for _ in range(2):
        account.measure(0, 3 * plain_s, 12, reading_s=0.0, passes=3)
    return account


def test_passes_without_guesses_are_known_after_three_windows_others_after_one() -> None:
    account = BatchAccount()
    for window in range(3):
        assert account.seconds(0, 9) is None
        account.measure(0, 3.0, window, reading_s=0.0, passes=3)
        account.measure(5, 6.0, window, reading_s=0.0, passes=3)
        assert account.seconds(5, 9) == 2.0
    assert account.seconds(0, 9) == 1.0


def test_what_was_hardly_measured_is_soon_forgotten() -> None:
    account = known_account()
    account.measure(5, 2.0, 100, reading_s=0.0)
    account.end_trial(5, 100)
    assert account.seconds(5, 600) == 2.0
    assert account.seconds(5, 700) is None
    assert account.seconds(0, 10_000) == 1.0
    assert account.seconds(0, 20_000) is None


def test_the_credit_is_given_once() -> None:
    account = known_account()
    assert account.account_s == CREDIT
    account.measure(0, 3.0, 20, reading_s=0.0, passes=3)
    assert account.account_s == CREDIT


def test_a_hundredth_of_all_time_is_added_up_to_a_limit() -> None:
    account = known_account()
    account.passed(0, 100.0, 100)
    assert account.account_s == pytest.approx(CREDIT + 1)
    account.passed(0, 100_000.0, 100_000)
    account.measure(0, 3.0, 20, reading_s=10.0, passes=3)
    assert account.account_s == 64 + 20


def test_guessing_ends_where_the_account_is_empty_or_much_is_lost_in_a_row() -> None:
    account = known_account()
    assert not account.charge(-3.0, 8, 1.0, in_a_row=False)
    assert account.charge(-1.5, 8, 1.0, in_a_row=False)
    account = known_account()
    account.account_s = 50.0
    assert not account.charge(-2.5, 8, 1.0, in_a_row=True)
    assert account.charge(-1.0, 8, 1.0, in_a_row=True)
    account.begin()
    assert not account.charge(-8.0, 1, 1.0, in_a_row=True), "a single row may have bad luck"


def test_what_was_won_in_between_makes_a_new_row() -> None:
    account = known_account()
    account.account_s = 50.0
    for _ in range(10):
        assert not account.charge(-2.0, 8, 1.0, in_a_row=True)
        assert not account.charge(3.0, 8, 1.0, in_a_row=True)


def test_who_gave_up_waits_for_more_than_there_is_and_keeps_what_was_seen() -> None:
    account = known_account()
    account.charge(-6.0, 8, 1.0, in_a_row=True)
    account.give_up(5, 3.0, 1.0, 40)
    assert account.reserve_s == CREDIT
    assert account.seconds(5, 50) == 3.0
    account.begin()
    assert account.reserve_s == 0
