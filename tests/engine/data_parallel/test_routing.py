"""Which engine gets a request, as a table."""

import pytest

from mini_infer_engine.data_parallel.routing import Candidate, choose_engine

IDLE = Candidate()
DEAD = Candidate(is_alive=False)


@pytest.mark.parametrize(
    ("candidates", "turn", "chosen"),
    [
        pytest.param([IDLE, IDLE], 0, 0, id="all idle: the first has its turn"),
        pytest.param([IDLE, IDLE], 1, 1, id="then the second"),
        pytest.param([IDLE, IDLE, IDLE], 5, 2, id="and so on"),
        pytest.param([IDLE, Candidate(cached_tokens=512)], 0, 1, id="who holds the prefix"),
        pytest.param([Candidate(512), Candidate(1024)], 0, 1, id="who holds more of it"),
        pytest.param([Candidate(2000), Candidate(1008)], 0, 0, id="no more than the prompt can be held"),
        pytest.param([Candidate(requests=1), IDLE], 0, 1, id="who has nothing to do"),
        pytest.param([Candidate(queued_tokens=500), Candidate(queued_tokens=400)], 0, 1, id="the shorter queue"),
        pytest.param([Candidate(running_tokens=9_000), Candidate(running_tokens=100)], 0, 1, id="less to read a pass"),
        pytest.param([Candidate(cached_tokens=512, requests=4), IDLE], 0, 0, id="a prefix is worth waiting for some"),
        pytest.param([Candidate(cached_tokens=512, requests=9), IDLE], 0, 1, id="but not for many"),
        pytest.param([Candidate(cached_tokens=512, queued_tokens=600), IDLE], 0, 1, id="nor for a long queue"),
        pytest.param([DEAD, Candidate(requests=99, queued_tokens=10**6)], 0, 1, id="never a dead one"),
        pytest.param([Candidate(cached_tokens=1024, is_alive=False), IDLE], 0, 1, id="whatever it held"),
        pytest.param([DEAD, DEAD], 0, None, id="nobody lives"),
        pytest.param([Candidate(queued_tokens=128), Candidate(requests=2)], 1, 0, id="of equals the fewest requests"),
    ],
)
def test_engine_choice_by_hits_and_load(candidates: list[Candidate], turn: int, chosen: int | None) -> None:
    assert choose_engine(1024, candidates, turn) == chosen
