"""The share of a canary: which revision answers a session, as tables."""

import pytest

from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.endpoints.canary import Canary
from mini_infer_gateway.routing.base import Candidate, RoutingRequest
from mini_infer_gateway.routing.filters.canary_share import CanaryShare, share_point

SESSIONS = [f"session {number}" for number in range(2000)]


def candidate(name: str, canary: Canary | None = None, *, circuit_open: bool = False) -> Candidate:
    return Candidate(Endpoint(name=name, url="", model="m"), canary=canary, circuit_open=circuit_open)


def kept(session: str, *candidates: Candidate) -> list[str]:
    request = RoutingRequest("m", 1, session=session)
    return [one.name for one in CanaryShare().keep(request, candidates)]


@pytest.mark.parametrize("weight", [0.0, 0.05, 0.25, 0.5, 1.0])
def test_a_canary_answers_its_share_of_sessions(weight: float) -> None:
    canary = Canary("new", weight)
    answered = sum(kept(session, candidate("old"), candidate("new", canary)) == ["new"] for session in SESSIONS)
    assert answered / len(SESSIONS) == pytest.approx(weight, abs=0.025)


def test_sessions_stay_with_the_canary_when_its_share_grows() -> None:
    chosen = [
        {s for s in SESSIONS if kept(s, candidate("old"), candidate("new", Canary("new", weight))) == ["new"]}
        for weight in (0.05, 0.25, 0.5)
    ]
    assert chosen[0] < chosen[1] < chosen[2]


def test_another_revision_gets_other_sessions() -> None:
    points = [(share_point("new", session), share_point("newer", session)) for session in SESSIONS]
    assert sum(one < 0.05 and other < 0.05 for one, other in points) < 20


LIVE, MIRRORED = Canary("new", 1.0), Canary("new", 0.0, mirror=0.5)


@pytest.mark.parametrize(
    ("candidates", "names"),
    [
        pytest.param([candidate("a"), candidate("b")], ["a", "b"], id="no canary"),
        pytest.param([candidate("a"), candidate("new", LIVE, circuit_open=True)], ["a"], id="a broken canary"),
        pytest.param([candidate("new", LIVE, circuit_open=True)], ["new"], id="nothing but a broken canary"),
        pytest.param([candidate("a"), candidate("new", MIRRORED)], ["a"], id="a canary that gets copies"),
        pytest.param([candidate("new", MIRRORED)], [], id="nothing but a canary that gets copies"),
        pytest.param([candidate("a", circuit_open=True), candidate("new", MIRRORED)], ["a"], id="the old one broken"),
    ],
)
def test_the_revision_that_may_answer_is_kept(candidates: list[Candidate], names: list[str]) -> None:
    assert kept("s", *candidates) == names


def test_every_revision_may_answer_when_a_request_has_no_session() -> None:
    assert kept("", candidate("a"), candidate("new", MIRRORED)) == ["a", "new"]


def test_a_live_canary_stands_in_when_no_other_engine_is_left() -> None:
    canary = Canary("new", 0.05)
    assert {tuple(kept(session, candidate("new", canary))) for session in SESSIONS[:200]} == {("new",)}
