"""The limits of a new revision, as a table: figures of both revisions in, the broken limit out."""

from datetime import UTC, datetime

import pytest

from mini_infer_contract.scaling import LATENCY_BUCKETS_S, bucket_of
from mini_infer_operator.canary.judge import breach_of, percentile_s
from mini_infer_operator.canary.policy import Analysis
from mini_infer_operator.observe import ObservedCanary, ObservedWorkload, RevisionWindow

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MIB = 1 << 20


def latencies(*seconds: float) -> list[int]:
    counts = [0] * (len(LATENCY_BUCKETS_S) + 1)
    for each in seconds:
        counts[bucket_of(each)] += 1
    return counts


def engines(restarts: int = 0, last_end: str = "") -> list[ObservedWorkload]:
    return [ObservedWorkload("unified", "new", 1, 1, 1, restarts=restarts, last_end=last_end)]


GOOD = RevisionWindow(
    requests=1000, errors=1, ttft=latencies(*[0.1] * 500), itl=latencies(*[0.01] * 500), replays=20, divergence_sum=0.2
)
QUICK = Analysis(min_requests=20)


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        pytest.param(RevisionWindow(), None, id="nothing is known"),
        pytest.param(GOOD, None, id="as the old one"),
        pytest.param(RevisionWindow(requests=2, errors=2), None, id="two failures may be a lost connection"),
        pytest.param(RevisionWindow(requests=3, errors=3), "Errors", id="three of three"),
        pytest.param(RevisionWindow(requests=1000, errors=9), None, id="within the error share"),
        pytest.param(RevisionWindow(requests=1000, errors=12), "Errors", id="above the error share"),
        pytest.param(RevisionWindow(requests=50, rejected=5), "Rejections", id="4xx where the old one answers"),
        pytest.param(RevisionWindow(ttft=latencies(*[0.13] * 40)), None, id="a third slower"),
        pytest.param(RevisionWindow(ttft=latencies(*[0.4] * 40)), "SlowFirstToken", id="first tokens, four times"),
        pytest.param(RevisionWindow(ttft=latencies(*[0.4] * 10)), None, id="slow, of too few requests"),
        pytest.param(RevisionWindow(ttft=latencies(*[0.1] * 39, 9.0)), None, id="one slow request among forty"),
        pytest.param(RevisionWindow(itl=latencies(*[0.03] * 40)), "SlowTokens", id="tokens three times slower"),
        pytest.param(RevisionWindow(replays=5, divergence_sum=0.1), None, id="another kernel"),
        pytest.param(RevisionWindow(replays=5, divergence_sum=5.0), "Answers", id="other weights"),
        pytest.param(RevisionWindow(replays=2, divergence_sum=5.0), None, id="too few answers"),
        pytest.param(RevisionWindow(unscored=3), "Answers", id="answers that it cannot score"),
        pytest.param(RevisionWindow(memory_growth_bytes=100 * MIB), None, id="a cache that fills"),
        pytest.param(RevisionWindow(memory_growth_bytes=600 * MIB), "MemoryGrowth", id="a leak"),
    ],
)
def test_limits_of_a_new_revision(new: RevisionWindow, reason: str | None) -> None:
    breach = breach_of(QUICK, ObservedCanary(new, GOOD, is_reported=True), engines())
    assert (breach.reason if breach else None) == reason


@pytest.mark.parametrize(("restarts", "limit", "broken"), [(0, 0, False), (1, 0, True), (2, 2, False), (3, 2, True)])
def test_restarts_break_their_limit(restarts: int, limit: int, broken: bool) -> None:
    found = breach_of(Analysis(max_restarts=limit), ObservedCanary(), engines(restarts, "pod a: OOMKilled"))
    assert (found is not None) == broken
    if found is not None:
        assert (found.reason, "OOMKilled" in found.message) == ("EngineRestarted", True)


@pytest.mark.parametrize(
    ("stable", "reason"),
    [
        (RevisionWindow(requests=1000, errors=300), None),
        (RevisionWindow(ttft=latencies(*[0.5] * 500)), None),
        (RevisionWindow(memory_growth_bytes=500 * MIB), None),
    ],
    ids=["the old one fails as well", "the old one is as slow", "the old one grows as well"],
)
def test_no_limit_is_broken_when_the_old_revision_fares_no_better(stable: RevisionWindow, reason: None) -> None:
    new = RevisionWindow(requests=100, errors=20, ttft=latencies(*[0.5] * 40), memory_growth_bytes=600 * MIB)
    only = RevisionWindow(
        requests=new.requests if stable.requests else 0,
        errors=new.errors if stable.requests else 0,
        ttft=new.ttft if stable.ttft else (),
        memory_growth_bytes=new.memory_growth_bytes if stable.memory_growth_bytes else 0,
    )
    assert breach_of(QUICK, ObservedCanary(only, stable), engines()) is reason


@pytest.mark.parametrize(("more_s", "reason"), [(0.0, None), (0.004, None), (0.06, "SlowTokens")])
def test_medians_are_compared_when_a_busy_machine_gives_both_revisions_a_long_tail(
    more_s: float, reason: str | None
) -> None:
    times_s = [0.012] * 180 + [0.08] * 90 + [0.25] * 30
    stable, new = (RevisionWindow(itl=latencies(*[s + more for s in times_s])) for more in (0.0, more_s))
    breach = breach_of(QUICK, ObservedCanary(new, stable), engines())
    assert (breach.reason if breach else None) == reason


def test_no_answers_are_compared_when_samples_is_zero() -> None:
    new = RevisionWindow(replays=50, divergence_sum=500.0, unscored=100)
    assert breach_of(Analysis(samples=0), ObservedCanary(new, GOOD), engines()) is None


@pytest.mark.parametrize("seconds", [0.004, 0.1, 1.7])
def test_percentiles_lie_within_the_bucket_of_their_samples(seconds: float) -> None:
    index = bucket_of(seconds)
    found = percentile_s(latencies(*[seconds] * 100), 0.95)
    assert (LATENCY_BUCKETS_S[index - 1] if index else 0.0) < found <= LATENCY_BUCKETS_S[index]
