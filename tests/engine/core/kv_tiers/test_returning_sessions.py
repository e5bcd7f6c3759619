"""Sessions that are expected are remembered by their last request, within bounds, and due before they return."""

from math import inf

import pytest

from mini_infer_engine.core.kv_tiers import returning_sessions
from mini_infer_engine.core.kv_tiers.returning_sessions import LOOK_EVERY_S, ReturningSessions, client_id
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core.sequence import Sequence


def ended(name: str, tokens: list[int], *, lease_s: float = 30.0, returns_s: float = 5.0) -> Sequence:
    request = Request(
        request_id=name, prompt_token_ids=tokens, sampling=SamplingParams(), lease_s=lease_s, returns_s=returns_s
    )
    sequence = Sequence(request, (0,), 0.0, b"root", 10**6, frozenset(), ())
    sequence.known_keys(len(tokens) // 16)
    return sequence


def test_a_session_is_due_from_its_return_to_the_end_of_its_lease() -> None:
    sessions = ReturningSessions()
    sessions.ended(ended("a#0", [1] * 40), 100.0)
    assert sessions.next_due_s == 105.0
    assert sessions.due(104.9) is None
    found = sessions.due(105.0)
    assert found is not None
    assert (list(found[0].token_ids), found[1]) == ([1] * 40, 130.0)
    assert sessions.due(105.0) is None
    assert sessions.next_due_s == 105.0 + LOOK_EVERY_S
    assert sessions.due(131.0) is None
    assert sessions.next_due_s == inf
    assert sessions.named("a") is not None, "a gateway may still announce it"


def test_a_session_has_one_entry_when_it_continues() -> None:
    sessions = ReturningSessions()
    sessions.ended(ended("a#0", [1] * 40), 100.0)
    sessions.ended(ended("b#1", [1] * 80), 101.0)
    sessions.ended(ended("other#2", [2] * 80), 101.0)
    assert sessions.named("a") is None
    assert sessions.named("b") is not None
    assert len(sessions) == 2
    sessions.forget(ended("", [1] * 90))
    assert sessions.named("b") is None


@pytest.mark.parametrize(
    "sequence", [ended("a#0", [1] * 40, lease_s=0.0), ended("a#0", [1] * 40, lease_s=-1.0), ended("a#0", [1] * 15)]
)
def test_nothing_is_remembered_when_no_return_is_expected_or_no_block_is_full(sequence: Sequence) -> None:
    sessions = ReturningSessions()
    sessions.ended(sequence, 100.0)
    assert len(sessions) == 0


def test_the_latest_request_counts_when_a_client_uses_an_id_again() -> None:
    sessions = ReturningSessions()
    sessions.ended(ended("a#0", [1] * 40), 100.0)
    sessions.ended(ended("a#1", [2] * 40), 100.0)
    session = sessions.named("a")
    assert session is not None
    assert list(session.token_ids) == [2] * 40
    assert len(sessions) == 1
    assert sessions._num_tokens == 40


def test_the_oldest_sessions_go_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returning_sessions, "MAX_SESSIONS", 3)
    monkeypatch.setattr(returning_sessions, "MAX_TOKENS", 100)
    sessions = ReturningSessions()
    for number in range(5):
        sessions.ended(ended(f"s{number}#0", [number] * 20), 100.0)
    assert [sessions.named(f"s{number}") is not None for number in range(5)] == [False, False, True, True, True]
    sessions.ended(ended("long#0", [9] * 90), 100.0)
    assert len(sessions) == 1
    sessions.clear()
    assert (len(sessions), sessions._num_tokens, sessions.next_due_s) == (0, 0, inf)


@pytest.mark.parametrize(("core", "client"), [("a#0", "a"), ("a#b#12", "a#b"), ("offline", "offline")])
def test_the_id_of_a_client_is_found_in_the_core_s(core: str, client: str) -> None:
    assert client_id(core) == client
