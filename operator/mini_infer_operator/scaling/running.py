"""Computes the engines that running requests need, by the time between tokens and by their tokens in flight. Pure.

Both are counts of a moment, which chance moves up and down. So short means decide, and alone only a rise beyond chance,
as for the work that arrives (forecast.py).
"""

from dataclasses import dataclass, replace
from math import inf

from mini_infer_operator.scaling.demand import memory_engines, rows_engines
from mini_infer_operator.scaling.forecast import (
    NO_HISTORY,
    NO_MARGIN,
    STEP_S,
    History,
    Margin,
    forecast_percentile,
    level,
    margin,
    steady,
)
from mini_infer_operator.scaling.policy import Targets
from mini_infer_operator.scaling.signals import EngineRates, Sample


@dataclass(frozen=True, slots=True)
class Running:
    """The engines that running requests of a role need, and the last hour of these numbers."""

    rows_now: float = 0.0
    """Engines for the time between tokens, by the latest sample alone."""
    rows: float = 0.0
    """Engines for the time between tokens, without what chance explains."""
    tokens_now: float = 0.0
    """Engines for the tokens in flight, by the latest sample alone; 0 without such a target."""
    tokens: float = 0.0
    """Engines for the tokens in flight, without what chance explains and with the margin of a forecast."""
    tokens_lasting: float = 0.0
    """Engines for the tokens in flight without short peaks, for which engines stay."""
    row_history: History = NO_HISTORY
    token_history: History = NO_HISTORY
    margin: Margin = NO_MARGIN
    """The forecast's margin by the history of tokens."""

    def observed(
        self,
        role: str,
        sample: Sample,
        rates: EngineRates,
        targets: Targets,
        prompt_tokens: float,
        start_s: float,
        patience: float,
    ) -> "Running":
        """Returns the state after a sample. `prompt_tokens` is the mean number of uncached tokens of a prompt, and
        `patience` that of `margin`.

        Requests have their rows and tokens in engines that decode, so prefill engines need none.
        """
        if role == "prefill":
            return self
        rows_now = rows_engines(sample, targets, rates, prompt_tokens)
        rows = self.row_history.add(sample.at_s, rows_now)
        after = replace(self, rows_now=rows_now, rows=level(rows, _unit(rows, sample)), row_history=rows)
        if targets.tokens_in_flight == inf:
            return after
        tokens_now = memory_engines(sample, targets)
        tokens = self.token_history.add(sample.at_s, tokens_now)
        is_same = tokens.values is self.token_history.values  # the margin takes a while to compute
        percentile = forecast_percentile(targets.percentile)
        # Its unit of 0 guesses nothing before errors are known: the target itself says what an engine may have.
        more = self.margin if is_same else margin(tokens, start_s, percentile, 0.0, patience)
        mean = steady(tokens)
        return replace(
            after,
            tokens_now=tokens_now,
            tokens=max(level(tokens, _unit(tokens, sample)), mean + more.ahead),
            tokens_lasting=mean + more.kept,
            token_history=tokens,
            margin=more,
        )


NOTHING_RUNS = Running()


def _unit(history: History, sample: Sample) -> float:
    """Returns what one running request counts, for `level`: that expects arrivals of a step, of which chance moves the
    mean less the longer the step is. A count of those that run at a moment moves by its whole deviation.
    """
    return STEP_S * history.values[-1] / max(1, sample.running_requests) if history.values else 0.0
