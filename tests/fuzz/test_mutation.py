"""The fuzzer's own parts: mutations change one place, and requests of one seed are the same ones."""

from random import Random

from tests.fuzz.hostile.http_grammar import Manner, fuzzed_request
from tests.fuzz.hostile.schemas import body
from tests.fuzz.mutation import mutated, mutated_bytes

SAMPLE = 400
VALUE = {"a": [1, 2, {"b": "c"}], "d": {"e": 5}}


def test_original_stays_as_it_was_when_a_copy_is_mutated() -> None:
    random = Random(1)
    changed = [mutated(random, VALUE) for _ in range(300)]
    assert VALUE == {"a": [1, 2, {"b": "c"}], "d": {"e": 5}}
    assert sum(one != VALUE for one in changed) > 280


def test_bytes_may_be_empty_when_they_are_mutated() -> None:
    random = Random(2)
    assert all(isinstance(mutated_bytes(random, wire), bytes) for wire in (b"", b"a", b"abc") for _ in range(100))


def test_requests_repeat_when_their_seed_does() -> None:
    requests = [fuzzed_request(5, index, "m") for index in range(SAMPLE)]
    assert requests == [fuzzed_request(5, index, "m") for index in range(SAMPLE)]
    assert requests != [fuzzed_request(6, index, "m") for index in range(SAMPLE)]
    assert {request.manner for request in requests} == set(Manner)
    assert len({request.wire for request in requests}) > SAMPLE * 0.6
    assert any(b"image_url" in request.wire for request in requests)


def test_schemas_repeat_when_their_seed_does() -> None:
    def leaves(value: object) -> list[object]:
        """Walks without recursion, for schemas are deep."""
        found, waiting = [], [value]
        while waiting:
            inside = waiting.pop()
            if isinstance(inside, dict | list):
                waiting += inside.items() if isinstance(inside, dict) else inside
            elif isinstance(inside, tuple):
                found.append(inside[0])
                waiting.append(inside[1])
            else:
                found.append(inside)
        return found

    assert [leaves(body(Random(i))) for i in range(50)] == [leaves(body(Random(i))) for i in range(50)]
