"""What a run has shown: latency, output and reuse, from its answers. Knows no engines."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.routing.rates import PassRates
from benchmarks.routing.workload import Workload, attainable_hits
from benchmarks.routing.world import Answer

MEASURED_SHARE = 0.95
"""Output is taken as finished requests' tokens up to this share of them, over the time until then: the last requests of
a run, which leave engines half empty, say nothing about its rate."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One run's."""

    requests: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    output_tokens_s: float
    hit_share: float
    """Of all prompt tokens."""
    reuse: float
    """Hit tokens over those of one LRU cache as large as all caches together."""
    computed_tokens: int
    imbalance: float
    """Prompt tokens computed by the busiest engine, over the mean."""
    job_p50_s: float = 0.0
    job_p90_s: float = 0.0
    """From a session's first arrival to its last end; 0: sessions are not known."""
    host_share: float = 0.0
    """Of all prompt tokens, those that came from main memory."""


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of values in order; nearest rank."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def figures(answers: Sequence[Answer], attainable_tokens: int, engine_count: int, host_tokens: int = 0) -> Figures:
    """Over all answers that were not refused; `host_tokens` of their prompts came from main memory."""
    served = [answer for answer in answers if not answer.refused]
    waits = sorted(answer.first_token_s - answer.request.arrival_s for answer in served)
    hit = sum(answer.cached_tokens for answer in served)
    computed = [0] * engine_count
    for answer in served:
        computed[answer.engine] += answer.request.prompt_tokens - answer.cached_tokens
    prompt = sum(answer.request.prompt_tokens for answer in served)
    jobs = job_times_s([answer for answer in served if answer.request.session >= 0]) or [0.0]
    return Figures(
        requests=len(served),
        ttft_mean_s=sum(waits) / len(waits),
        ttft_p50_s=quantile(waits, 0.5),
        ttft_p90_s=quantile(waits, 0.9),
        ttft_p99_s=quantile(waits, 0.99),
        output_tokens_s=output_rate(served),
        hit_share=hit / prompt,
        reuse=hit / attainable_tokens if attainable_tokens else 1.0,
        computed_tokens=sum(computed),
        imbalance=max(computed) * engine_count / max(1, sum(computed)),
        job_p50_s=quantile(jobs, 0.5),
        job_p90_s=quantile(jobs, 0.9),
        host_share=host_tokens / prompt,
    )


def gap_s(gaps: Iterable[tuple[float, int]], share: float) -> float:
    """Of the pauses between two tokens of a request, (seconds, how many) each; nearest rank."""
    ordered = sorted(gaps)
    left = share * sum(count for _, count in ordered)
    for seconds, count in ordered:
        left -= count
        if left < 0:
            return seconds
    return 0.0


def job_times_s(answers: Sequence[Answer]) -> list[float]:
    """Returns, in order, the seconds from the first arrival to the last end of each session."""
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for answer in answers:
        session, arrival_s = answer.request.session, answer.request.arrival_s
        begins[session] = min(arrival_s, begins.get(session, arrival_s))
        ends[session] = max(answer.end_s, ends.get(session, 0.0))
    return sorted(ends[session] - begins[session] for session in ends)


def within(answers: Sequence[Answer], first_token_s: float, per_token_s: float) -> float:
    """Share of requests whose first token and whose mean time per further token kept their targets (goodput)."""
    kept = 0
    for answer in answers:
        wait_s, more = answer.first_token_s - answer.request.arrival_s, max(1, answer.request.output_tokens - 1)
        kept += wait_s <= first_token_s and (answer.end_s - answer.first_token_s) / more <= per_token_s
    return kept / len(answers)


def output_rate(served: Sequence[Answer]) -> float:
    """Output tokens a second until MEASURED_SHARE of them are there."""
    start_s = min(answer.request.arrival_s for answer in served)
    total = sum(answer.request.output_tokens for answer in served)
    done = 0
    for answer in sorted(served, key=lambda answer: answer.end_s):
        done += answer.request.output_tokens
        if done >= MEASURED_SHARE * total:
            return done / (answer.end_s - start_s)
    raise AssertionError("all answers together are all of the output")


def capacity_s(workload: Workload, rates: PassRates, engine_count: float, kv_blocks: int, max_num_seqs: int) -> float:
    """Seconds that so many engines need for this workload if all of them are always busy and no attainable hit is lost.

    Prompts cost their uncached tokens; an output token costs its share of a pass with as many rows as a cache holds of
    these contexts. A load of 1.0 means that requests arrive within this time.
    """
    hits = attainable_hits(workload, int(kv_blocks * engine_count))
    prompts_ms = decodes_ms = 0.0
    context = workload.mean_context_tokens
    rows = max(1, min(max_num_seqs, int(0.8 * kv_blocks * workload.block_tokens / context)))
    step_ms = max(rates.weights_ms, rates.token_ms * rows) + rates.row_ms * rows + rates.kv_token_ms * rows * context
    for request, hit in zip(workload.requests, hits, strict=True):
        new = request.prompt_tokens - hit
        prompts_ms += rates.token_ms * new + rates.pair_ms * new * (hit + new / 2)
        decodes_ms += request.output_tokens * step_ms / rows
    return (prompts_ms + decodes_ms) / engine_count / 1000
