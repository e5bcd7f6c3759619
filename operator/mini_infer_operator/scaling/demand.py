"""Computes how many engines a load keeps busy, from measured rates. Pure.

An engine is busy for `1 / prefill_tokens_per_s` with each uncached prompt token, and for `row_s` with each output
token; a pass takes `pass_s` at least. If it is busy for a share `u` of the time, the time between two tokens is
`pass_s / (1 - u)`, and a prompt waits as in a queue of utilisation `u`. Both give the highest `u` that keeps a target.
"""

from dataclasses import dataclass
from math import inf, log

from mini_infer_operator.scaling.policy import Targets
from mini_infer_operator.scaling.signals import EngineRates, Sample

LOWEST_UTILISATION, HIGHEST_UTILISATION = 0.2, 0.9
ITL_SPREAD = 1.2
"""The time between tokens of a slow request over that of the mean one. In benchmarks/autoscaling.py 1 to 5 % of the
requests miss a target that is this much above the mean.
"""
BACKLOG_STARTS = 0.5
"""The part of a start within which a backlog is worked off: engines that come later than that do not help it."""
LEAST_DRAIN_S = 5.0
ROLES = ("unified", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class Work:
    """Engines that are busy without a pause."""

    prefill: float = 0.0
    decode: float = 0.0

    def of(self, role: str) -> float:
        """Returns the work that engines of this role do."""
        return {"prefill": self.prefill, "decode": self.decode}.get(role, self.prefill + self.decode)


def work_of(sample: Sample, rates: EngineRates) -> Work:
    """Returns the work that arrives."""
    return Work(sample.prompt_tokens_per_s / rates.prefill_tokens_per_s, sample.output_tokens_per_s * rates.row_s)


def utilisation(role: str, targets: Targets, rates: EngineRates, prompt_tokens: float) -> float:
    """Returns the highest utilisation at which engines of this role keep the targets.

    `prompt_tokens` is the mean number of uncached tokens of a prompt. Waits are taken as exponential: their percentile
    p is -ln(1 - p) times the mean.
    """
    limits = [HIGHEST_UTILISATION]
    if role != "prefill" and targets.itl_s < inf:
        limits.append(1 - ITL_SPREAD * rates.pass_s / targets.itl_s)
    if role != "decode" and targets.ttft_s < inf:
        prompt_s = prompt_tokens / rates.prefill_tokens_per_s + rates.pass_s
        wait_s = max(0.0, targets.ttft_s - prompt_s)
        mean_s = -log(1 - targets.percentile) * prompt_s
        limits.append(wait_s / (wait_s + mean_s) if wait_s else 0.0)
    return max(LOWEST_UTILISATION, min(limits))


def backlog_engines(
    role: str, sample: Sample, targets: Targets, rates: EngineRates, ready: int, start_s: float
) -> float:
    """Returns the engines that the waiting prompt tokens need beside the arriving work.

    What `ready` engines compute within the target for the first token is no backlog.
    """
    if role == "decode":
        return 0.0
    waiting_s = sample.queued_tokens / rates.prefill_tokens_per_s
    usual_s = ready * min(targets.ttft_s, start_s)
    drain_s = max(LEAST_DRAIN_S, targets.ttft_s if targets.ttft_s < inf else 0.0, BACKLOG_STARTS * start_s)
    return max(0.0, waiting_s - usual_s) / drain_s


def rows_engines(sample: Sample, targets: Targets, rates: EngineRates, prompt_tokens: float) -> float:
    """Returns the engines that the requests which decode now need to keep the time between tokens.

    Requests whose prompts still wait are left out; `prompt_tokens` is the mean number of their uncached tokens.
    """
    waiting = sample.queued_tokens / prompt_tokens if prompt_tokens else 0.0
    rows = max(0.0, sample.running_requests - waiting)
    itl_s = min(targets.itl_s / ITL_SPREAD, rates.pass_s / (1 - HIGHEST_UTILISATION))
    return rows * rates.row_s / max(itl_s - rates.pass_s, 0.1 * itl_s)


def memory_engines(sample: Sample, targets: Targets) -> float:
    """Returns the engines that the tokens in flight need."""
    return sample.tokens_in_flight / targets.tokens_in_flight
