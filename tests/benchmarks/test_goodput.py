"""Which server a request goes to, which requests are kept, and from which length apart is no worse."""

import sys

import pytest

from tests.engine.server.dry_server import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from common.goodput import break_even, kept
from common.streams import Arrival, Fleet


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([(1.0, 0.5), (1.0, 1.0), (0.9, 0.2)], 512),
        ([(0.4, 0.5), (0.9, 0.9), (0.9, 0.2)], 2048),
        ([(1.0, 0.5), (0.9, 1.0), (0.9, 0.2)], 8192),  # from there on, not here and there
        ([(1.0, 0.5), (1.0, 0.5), (0.1, 0.2)], None),
        ([(1.0, 0.5), (None, 0.5), (0.3, 0.2)], 8192),  # what was not measured tells nothing
    ],
)
def test_the_break_even_length(shares: list[tuple[float | None, float | None]], expected: int | None) -> None:
    assert break_even((512, 2048, 8192), shares) == expected


def test_a_request_is_kept_within_both_targets() -> None:
    seen = {"ttft_s": [0.5, 0.51, 0.1, 0.1], "gap_p95_s": [0.02, 0.01, 0.021, 0.0]}
    assert kept(seen, 0.5, 0.02) == 0.5


def test_a_request_goes_to_the_server_with_the_least_to_compute_before_its_first_token() -> None:
    fleet = Fleet(["one", "two"], {})
    first = Arrival(0.0, b"", 2048, (1, 2, 3, 4))
    assert fleet.take(first) == (0, 2048)
    assert fleet.take(Arrival(0.0, b"", 512)) == (1, 512)
    assert fleet.take(Arrival(0.0, b"", 2048, (1, 2, 9, 9))) == (1, 2048)  # half is held by one, where 2,048 wait
    fleet.first_token(0, 2048)
    assert fleet.take(first) == (0, 0)
