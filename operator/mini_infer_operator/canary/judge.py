"""Judges a new revision by the figures of both: returns what is wrong with it, as a sentence with the figure. Pure.

The comparison is with the old revision at the same time, as Flagger's and Argo Rollouts' analyses of a baseline are: a
busy hour is no fault of the new revision.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mini_infer_contract.scaling import LATENCY_BUCKETS_S
from mini_infer_operator.canary.policy import Analysis
from mini_infer_operator.observe import ObservedCanary, ObservedWorkload, RevisionWindow

LEAST_FAILURES = 3
"""Failures that are a breach at least: one or two may be a lost connection."""
HIGHEST_PERCENTILE = 0.95
MEDIAN = 0.5
"""Compared as well: on a busy machine both revisions have the same long tail, behind which a slow revision hides."""
SAMPLES_ABOVE = 3
"""Samples that lie above the compared percentile at least, so that one slow request decides nothing."""
CONFIDENCE = 2.5
"""Standard deviations of a percentile by which it is taken lower for the new revision and higher for the old one. The
comparison is repeated every two seconds, so one at 95 % would roll good revisions back on a noisy machine: one did.
"""
LEAST_DIFFERENCES_S = {"ttft": 0.020, "itl": 0.002, "whole": 0.002}
"""Seconds by which a latency must differ besides its ratio: less is noise of a fast engine."""
_NAMES = {
    "ttft": ("SlowFirstToken", "time to the first token, for each 512 uncached prompt tokens,"),
    "itl": ("SlowTokens", "time between tokens"),
    "whole": ("SlowAnswers", "time for each token of whole answers"),
}
DIVERGING_REPLAYS = 3
"""Compared answers from which a divergence counts."""


@dataclass(frozen=True, slots=True)
class Breach:
    """A limit that a new revision breaks."""

    reason: str
    message: str


def breach_of(limits: Analysis, seen: ObservedCanary, engines: Sequence[ObservedWorkload]) -> Breach | None:
    """Returns the first limit that the new revision breaks, None if it keeps all. `engines` are its workloads."""
    return (
        _restarts(limits, engines)
        or _failures(limits, seen)
        or _answers(limits, seen.new)
        or _latencies(limits, seen)
        or _memory(limits, seen)
    )


def percentile_s(counts: Sequence[int], share: float) -> float:
    """Returns the percentile of latencies in buckets, interpolated within the bucket that has it."""
    left = share * sum(counts)
    for index, count in enumerate(counts):
        if count and left <= count:
            below = LATENCY_BUCKETS_S[index - 1] if index else 0.0
            above = LATENCY_BUCKETS_S[min(index, len(LATENCY_BUCKETS_S) - 1)]
            return below + (above - below) * left / count
        left -= count
    return 0.0


def _restarts(limits: Analysis, engines: Sequence[ObservedWorkload]) -> Breach | None:
    restarts = sum(workload.restarts for workload in engines)
    if restarts <= limits.max_restarts:
        return None
    end = next((f": {workload.last_end}" for workload in engines if workload.last_end), "")
    times = "once" if restarts == 1 else f"{restarts} times"
    return Breach("EngineRestarted", f"its engines ended {times} (limit {limits.max_restarts}){end}")


def _failures(limits: Analysis, seen: ObservedCanary) -> Breach | None:
    new, stable = seen.new, seen.stable
    for reason, word, bad, usual in (
        ("Errors", "failed", new.errors, stable.errors),
        ("Rejections", "were rejected with a 4xx", new.rejected, stable.rejected),
    ):
        share, expected = bad / max(1, new.requests), usual / max(1, stable.requests)
        if bad >= LEAST_FAILURES and share > expected + limits.max_error_share:
            message = (
                f"{bad} of {new.requests} requests {word} ({share:.1%}), against {usual} of {stable.requests} at the "
                f"old revision (limit {limits.max_error_share:.1%} more)"
            )
            return Breach(reason, message)
    return None


def _answers(limits: Analysis, new: RevisionWindow) -> Breach | None:
    if not limits.samples:
        return None
    if new.unscored >= DIVERGING_REPLAYS and new.unscored > new.replays:
        return Breach("Answers", f"it could not score {new.unscored} of {new.unscored + new.replays} old answers")
    if new.replays < min(DIVERGING_REPLAYS, limits.samples):
        return None
    mean = new.divergence_sum / new.replays
    if mean <= limits.max_divergence:
        return None
    message = (
        f"log probabilities of {new.replays} old answers differ by {mean:.3f} nats a token on average "
        f"(limit {limits.max_divergence:g}): weights, quantisation, tokenizer or chat template differ"
    )
    return Breach("Answers", message)


def _latencies(limits: Analysis, seen: ObservedCanary) -> Breach | None:
    for kind, least_s in LEAST_DIFFERENCES_S.items():
        new, stable = getattr(seen.new, kind), getattr(seen.stable, kind)
        samples = min(sum(new), sum(stable))
        if samples < max(1, limits.min_requests):
            continue
        highest = max(MEDIAN, min(HIGHEST_PERCENTILE, 1 - SAMPLES_ABOVE / samples))
        for share in (highest, MEDIAN):
            slow_s = percentile_s(new, max(0.0, share - _margin(share, sum(new))))
            usual_s = percentile_s(stable, min(1.0, share + _margin(share, sum(stable))))
            if slow_s > limits.max_latency_ratio * usual_s and slow_s - usual_s > least_s:
                reason, name = _NAMES[kind]
                message = (
                    f"p{100 * share:.0f} of the {name} is at least {1000 * slow_s:.1f} ms in {sum(new)} requests, "
                    f"against at most {1000 * usual_s:.1f} ms at the old revision (limit "
                    f"{limits.max_latency_ratio:g} times)"
                )
                return Breach(reason, message)
    return None


def _margin(share: float, samples: int) -> float:
    """Returns how far the percentile of so many samples may lie from the real one, as a share of the samples."""
    return float(CONFIDENCE * (share * (1 - share) / samples) ** 0.5)


def _memory(limits: Analysis, seen: ObservedCanary) -> Breach | None:
    grown, usual = seen.new.memory_growth_bytes, seen.stable.memory_growth_bytes
    if grown <= limits.max_memory_growth_bytes + usual:
        return None
    message = (
        f"memory of one of its engines grew by {grown / 2**20:.0f} MiB in the last minute, without pause, against "
        f"{usual / 2**20:.0f} MiB at the old revision (limit {limits.max_memory_growth_bytes / 2**20:.0f} MiB more)"
    )
    return Breach("MemoryGrowth", message)
