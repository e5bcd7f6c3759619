"""Turns reports of gateways into samples of one service: sums over gateways, and differences to the reports before.

Pure. A gateway that does not answer counts with its last state for a while; one that has started anew begins from zero,
and of one that is seen for the first time only what comes later counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mini_infer_contract.scaling import EngineLoad, GatewayLoads, ServiceLoad, percentile_s
from mini_infer_operator.scaling.signals import Sample

FORGET_S = 15.0
"""Seconds after which the queue of a gateway that does not answer counts no more: its clients have left it."""
NONE = ServiceLoad()


@dataclass(frozen=True, slots=True)
class Seen:
    """The last report of one gateway about one service."""

    started_s: float
    at_s: float
    load: ServiceLoad


@dataclass(frozen=True, slots=True)
class Observed:
    """The gateways' last reports, and what the service's samples need of the past."""

    gateways: Mapping[str, Seen] = field(default_factory=dict)
    at_s: float | None = None
    mean_output: float = 0.0


@dataclass(frozen=True, slots=True)
class ServiceSample:
    """A sample, with the engines behind it."""

    sample: Sample
    engines: Mapping[str, EngineLoad]
    mean_itl_s: float | None = None

    @property
    def prefill_tokens_per_s(self) -> float:
        """The mean rate that is known; 0 if none is."""
        known = [engine.prefill_tokens_per_s for engine in self.engines.values() if engine.prefill_tokens_per_s]
        return sum(known) / len(known) if known else 0.0

    @property
    def rows(self) -> float:
        """The mean number of running requests of engines that decode."""
        running = [engine.running for engine in self.engines.values() if engine.role != "prefill"]
        return sum(running) / len(running) if running else 0.0


def sample_of(
    observed: Observed, reports: Mapping[str, GatewayLoads], service: str, now_s: float, percentile: float
) -> tuple[ServiceSample | None, Observed]:
    """Returns the service's load since the last call, and what to pass to the next one.

    `reports` are the answers of gateways by address. Returns no sample the first time, and if no gateway has answered:
    then nothing is known, which is not the same as no load.
    """
    gateways = {url: seen for url, seen in observed.gateways.items() if now_s - seen.at_s <= FORGET_S}
    grown: list[ServiceLoad] = []
    for url, report in reports.items():
        load, before = report.services.get(service, NONE), gateways.get(url)
        is_restarted = before is not None and before.started_s != report.started_s
        grown.append(_difference(load, NONE if is_restarted else load if before is None else before.load))
        gateways[url] = Seen(report.started_s, now_s, load)
    if not reports:
        return None, observed
    seconds = 0.0 if observed.at_s is None else now_s - observed.at_s
    answers, output = sum(g.answers for g in grown), sum(g.output_tokens for g in grown)
    mean = observed.mean_output
    if answers:
        weight = 1.0 if not mean else min(1.0, answers / 50)
        mean += weight * (output / answers - mean)
    after = Observed(gateways, now_s, mean)
    if seconds <= 0:
        return None, after
    states = [seen.load for seen in gateways.values()]
    engines: dict[str, EngineLoad] = {}
    for state in states:
        engines |= state.engines
    ttft, itl = _sum([g.ttft_counts for g in grown]), _sum([g.itl_counts for g in grown])
    requests = sum(g.requests for g in grown)
    sample = Sample(
        at_s=now_s,
        prompt_tokens_per_s=sum(g.prompt_tokens for g in grown) / seconds,
        output_tokens_per_s=requests * mean / seconds,
        requests_per_s=requests / seconds,
        queued_tokens=float(
            sum(state.queued_tokens for state in states) + sum(engine.queued_tokens for engine in engines.values())
        ),
        queued_requests=sum(state.queued_requests for state in states),
        running_requests=sum(state.running_requests for state in states),
        tokens_in_flight=float(sum(state.tokens_in_flight for state in states)),
        ttft_s=percentile_s(ttft, percentile),
        itl_s=percentile_s(itl, percentile),
    )
    return ServiceSample(sample, engines, percentile_s(itl, 0.5)), after


def _difference(load: ServiceLoad, before: ServiceLoad) -> ServiceLoad:
    """Returns what the counters have grown by."""
    return ServiceLoad(
        requests=max(0, load.requests - before.requests),
        prompt_tokens=max(0, load.prompt_tokens - before.prompt_tokens),
        answers=max(0, load.answers - before.answers),
        output_tokens=max(0, load.output_tokens - before.output_tokens),
        ttft_counts=_grown(load.ttft_counts, before.ttft_counts),
        itl_counts=_grown(load.itl_counts, before.itl_counts),
    )


def _grown(counts: Sequence[int], before: Sequence[int]) -> list[int]:
    padded = [*before, *[0] * (len(counts) - len(before))]
    return [max(0, one - other) for one, other in zip(counts, padded, strict=False)]


def _sum(rows: Sequence[Sequence[int]]) -> list[int]:
    longest = max((len(row) for row in rows), default=0)
    return [sum(row[index] for row in rows if index < len(row)) for index in range(longest)]
