"""What is remembered of requests that ended engines, with the time passed in."""

from mini_infer_gateway.pipeline.poison_requests import (
    APART_S,
    KILLS_LIMIT,
    MAX_REQUESTS,
    RETENTION_S,
    PoisonRequests,
)

PATH = "/v1/completions"


def killed_twice() -> PoisonRequests:
    poison = PoisonRequests()
    poison.killed(PATH, b"body", "a", 0.0)
    poison.killed(PATH, b"body", "b", 0.1)
    return poison


def test_kills_are_counted_by_path_and_body_when_engines_end() -> None:
    poison = killed_twice()
    assert poison.kills(PATH, b"body", 1.0) == KILLS_LIMIT
    assert poison.kills(PATH, b"ydob", 1.0) == poison.kills("/v1/embeddings", b"body", 1.0) == 0
    assert poison.kills(PATH, b"longer", 1.0) == 0


def test_one_end_counts_once_when_several_copies_of_a_request_were_in_flight() -> None:
    poison = PoisonRequests()
    for _ in range(5):
        poison.killed(PATH, b"body", "a", 0.0)
    assert poison.kills(PATH, b"body", 0.0) == 1
    poison.killed(PATH, b"body", "a", APART_S)
    assert poison.kills(PATH, b"body", APART_S) == 2


def test_kills_are_forgotten_when_the_time_is_over_or_an_engine_answers() -> None:
    poison = killed_twice()
    assert poison.kills(PATH, b"body", 0.2 + RETENTION_S) == len(poison) == 0
    poison = killed_twice()
    poison.answered(PATH, b"body")
    assert poison.kills(PATH, b"body", 1.0) == len(poison) == 0


def test_memory_is_bounded_when_many_requests_end_engines() -> None:
    poison = PoisonRequests()
    for number in range(MAX_REQUESTS + 10):
        poison.killed(PATH, b"%d" % number, "a", 0.0)
    assert len(poison) == MAX_REQUESTS
    assert poison.kills(PATH, b"0", 0.0) == 0
    assert poison.kills(PATH, b"%d" % (MAX_REQUESTS + 9), 0.0) == 1
