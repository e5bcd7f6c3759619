"""A small sample of random requests and rude clients; `python -m benchmarks.http_fuzz --count 100000` has them all."""

from collections import Counter

from benchmarks.http_fuzz.client import run
from benchmarks.http_fuzz.requests import Manner, fuzzed_request
from benchmarks.http_fuzz.servers import Servers

SAMPLE = 400


def test_the_same_seed_makes_the_same_requests_of_every_kind() -> None:
    requests = [fuzzed_request(5, index, "m") for index in range(SAMPLE)]
    assert requests == [fuzzed_request(5, index, "m") for index in range(SAMPLE)]
    assert requests != [fuzzed_request(6, index, "m") for index in range(SAMPLE)]
    assert {request.manner for request in requests} == set(Manner)
    assert len({request.wire for request in requests}) > SAMPLE * 0.6


async def test_random_requests_break_neither_engine_nor_gateway() -> None:
    with Servers() as servers:
        for name, url in servers.urls.items():
            port = int(url.rpartition(":")[2])
            findings = await run("127.0.0.1", port, "dry", seed=3, first=0, count=SAMPLE, clients=8, limit_s=60.0)
            assert findings.wrong == [], name
            assert sum(findings.statuses.values()) == SAMPLE
            assert servers.left_over() == []
            answered = Counter({status: n for status, n in findings.statuses.items() if status.isdigit()})
            assert answered["200"] > SAMPLE * 0.2
            assert answered["400"] > SAMPLE * 0.2
