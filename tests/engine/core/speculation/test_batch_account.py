"""The account of what guessing has won and lost in batches of one size."""

import pytest

from mini_infer_engine.core.speculation.batch_account import CREDIT, BatchAccount


def known_account(plain_s: float = 1.0) -> BatchAccount:
    account = BatchAccount()
    account.measure(0, 12 * plain_s, 12, reading_s=0.0, passes=12)
    for _ in range(2):
        account.measure(0, 3 * plain_s, 12, reading_s=0.0, passes=3)
    return account


def test_plain_passes_are_measured_after_three_windows_and_drafting_ones_after_one() -> None:
    account = BatchAccount()
    for window in range(3):
        assert account.seconds(0, 9) is None
        account.measure(0, 3.0, window, reading_s=0.0, passes=3)
        account.measure(5, 6.0, window, reading_s=0.0, passes=3)
        assert account.seconds(5, 9) == 2.0
    assert account.seconds(0, 9) == 1.0


def test_pass_times_expire_earlier_when_they_have_few_measurements() -> None:
    account = known_account()
    account.measure(5, 2.0, 100, reading_s=0.0)
    account.end_trial(5, 100)
    assert account.seconds(5, 600) == 2.0
    assert account.seconds(5, 700) is None
    assert account.seconds(0, 10_000) == 1.0
    assert account.seconds(0, 20_000) is None


def test_the_speculation_credit_is_given_once() -> None:
    account = known_account()
    assert account.account_s == CREDIT
    account.measure(0, 3.0, 20, reading_s=0.0, passes=3)
    assert account.account_s == CREDIT


def test_the_speculation_credit_grows_by_one_percent_of_time_up_to_a_limit() -> None:
    account = known_account()
    account.passed(0, 100.0, 100)
    assert account.account_s == pytest.approx(CREDIT + 1)
    account.passed(0, 100_000.0, 100_000)
    account.measure(0, 3.0, 20, reading_s=10.0, passes=3)
    assert account.account_s == 64 + 20


def test_speculation_ends_when_its_credit_is_spent_or_losses_are_consecutive() -> None:
    account = known_account()
    assert not account.charge(-3.0, 8, 1.0, in_a_row=False)
    assert account.charge(-1.5, 8, 1.0, in_a_row=False)
    account = known_account()
    account.account_s = 50.0
    assert not account.charge(-2.5, 8, 1.0, in_a_row=True)
    assert account.charge(-1.0, 8, 1.0, in_a_row=True)
    account.begin()
    assert not account.charge(-8.0, 1, 1.0, in_a_row=True), "a single row may have bad luck"


def test_consecutive_losses_are_reset_when_speculation_gains() -> None:
    account = known_account()
    account.account_s = 50.0
    for _ in range(10):
        assert not account.charge(-2.0, 8, 1.0, in_a_row=True)
        assert not account.charge(3.0, 8, 1.0, in_a_row=True)


def test_speculation_waits_for_reserve_and_keeps_measurements_when_it_gave_up() -> None:
    account = known_account()
    account.charge(-6.0, 8, 1.0, in_a_row=True)
    account.give_up(5, 3.0, 1.0, 40)
    assert account.reserve_s == CREDIT
    assert account.seconds(5, 50) == 3.0
    account.begin()
    assert account.reserve_s == 0
