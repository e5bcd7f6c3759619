"""Sessions that return: how they are recognised, and the leases that follow from their gaps."""

import pytest

from mini_infer_contract.blocks import block_keys
from mini_infer_gateway.fleet.return_times import HORIZON_S, LEAST_RETURNS, RequestKind, Return, ReturnTimes
from mini_infer_gateway.index.prefix_index import prompt_root

ROOT = prompt_root()


def prompt(session: int, tokens: int) -> list[bytes]:
    return block_keys([session] * tokens, ROOT)


def loop(returns: ReturnTimes, gap_s: float, *, count: int, client: str = "a", kind: RequestKind = "result") -> float:
    """Has one session return so many times, each time with a longer prompt. Returns the time."""
    now_s, session = 1000.0, hash((client, kind)) % 50_000
    for turn in range(count):
        keys = prompt(session, 100 + 40 * turn)
        found = returns.arrived(keys, is_result=kind == "result", now_s=now_s)
        assert (found and found.gap_s) == (pytest.approx(gap_s) if turn else None)
        returns.ended(keys, client, kind, now_s + 2.0)
        now_s += 2.0 + gap_s
    return now_s


@pytest.mark.parametrize("gap_s", [0.1, 3.0, 40.0])
def test_a_lease_covers_the_gaps_that_were_seen_when_sessions_return(gap_s: float) -> None:
    returns = ReturnTimes()
    loop(returns, gap_s, count=30)
    assert gap_s <= returns.lease_s("a", "result") <= max(0.25, 1.5 * gap_s)
    assert returns.lease_s("another", "result") == returns.lease_s("a", "result"), "of all, until it has its own"
    assert returns.lease_s("a", "chat") == 0.0


@pytest.mark.parametrize(("gap_s", "earliest_s"), [(0.1, 0.0), (3.0, 2.0), (40.0, 25.0)])
def test_a_return_nears_before_most_sessions_have_returned(gap_s: float, earliest_s: float) -> None:
    returns = ReturnTimes()
    loop(returns, gap_s, count=30)
    assert earliest_s <= returns.expected("a", "result").returns_s <= gap_s


def test_a_session_is_forgotten_when_its_client_says_so() -> None:
    returns = ReturnTimes()
    returns.ended(prompt(1, 64), "a", "chat", 0.0)
    returns.forget(prompt(2, 80))
    returns.forget(prompt(1, 80))
    assert returns.arrived(prompt(1, 80), is_result=False, now_s=1.0) is None


def test_no_lease_is_given_when_few_returns_were_seen() -> None:
    returns = ReturnTimes()
    loop(returns, 3.0, count=int(LEAST_RETURNS) - 2)
    assert returns.lease_s("a", "result") == 0.0


def test_gaps_after_tool_calls_are_apart_when_people_read_the_other_answers() -> None:
    returns = ReturnTimes()
    loop(returns, 2.0, count=30, kind="result")
    loop(returns, 60.0, count=30, kind="chat")
    assert returns.lease_s("a", "result") < 5.0
    assert returns.lease_s("a", "chat") > 50.0


def test_clients_have_their_own_gaps_when_they_differ() -> None:
    returns = ReturnTimes()
    loop(returns, 2.0, count=30, client="fast")
    loop(returns, 50.0, count=30, client="slow")
    assert returns.lease_s("fast", "result") < 5.0 < 40.0 < returns.lease_s("slow", "result")


def test_no_lease_is_given_when_sessions_mostly_do_not_return() -> None:
    returns = ReturnTimes()
    now_s = loop(returns, 2.0, count=20)
    for number in range(200):
        returns.ended(prompt(60_000 + number, 64), "a", "result", now_s)
    returns.ended(prompt(1, 64), "a", "result", now_s + HORIZON_S + 1)
    assert returns.lease_s("a", "result") == 0.0


def test_a_session_is_recognised_once_when_a_prompt_continues_it() -> None:
    returns = ReturnTimes()
    returns.ended(prompt(1, 64), "a", "chat", 0.0, "r7", "ns/pod")
    assert returns.arrived(prompt(2, 64), is_result=False, now_s=1.0) is None
    assert returns.arrived(prompt(1, 48), is_result=False, now_s=1.0) == Return(1.0, "r7", "ns/pod")
    assert returns.arrived(prompt(1, 64), is_result=False, now_s=1.0) is None
    returns.ended(prompt(1, 16), "a", "chat", 0.0)
    assert returns.arrived(prompt(1, 64), is_result=False, now_s=1.0) is None, "a block is not enough"
