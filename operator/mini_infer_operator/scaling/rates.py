"""Learns how fast a service's engines are from what gateways report. Pure.

The time between two tokens grows with the requests that decode together: `pass_s + row_s * rows` where prompts take no
time. Its samples are fitted by least squares in which the past fades.
"""

from dataclasses import dataclass, replace

from mini_infer_operator.scaling.signals import EngineRates

FADE = 0.99
LEAST_WEIGHT = 10.0
"""Samples that a fit needs."""
LEAST_SPREAD = 0.5
"""The variance of rows that a fit needs: below it the slope is chance."""
BUSIEST = 0.8
"""Share of the time that prompts take, above which a sample says nothing about decoding."""


@dataclass(frozen=True, slots=True)
class LearnedRates:
    """Weighted sums over samples of (rows, seconds between tokens)."""

    prefill_tokens_per_s: float = 0.0
    weight: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0
    rows_squared: float = 0.0
    rows_seconds: float = 0.0
    least_s: float = 0.0
    """The shortest time between tokens so far; 0: none."""

    def prefill(self, tokens_per_s: float) -> "LearnedRates":
        """Returns the rates with what engines report of prompts; 0 changes nothing."""
        return replace(self, prefill_tokens_per_s=tokens_per_s or self.prefill_tokens_per_s)

    def decode(self, rows: float, itl_s: float, prefill_share: float) -> "LearnedRates":
        """Returns the rates with a sample. `rows` decode in each engine; prompts take `prefill_share` of its time."""
        if rows <= 0 or itl_s <= 0 or prefill_share > BUSIEST:
            return self
        alone_s = itl_s * (1 - max(0.0, prefill_share))
        return replace(
            self,
            weight=FADE * self.weight + 1,
            rows=FADE * self.rows + rows,
            seconds=FADE * self.seconds + alone_s,
            rows_squared=FADE * self.rows_squared + rows * rows,
            rows_seconds=FADE * self.rows_seconds + rows * alone_s,
            least_s=min(self.least_s or alone_s, alone_s),
        )

    def rates(self) -> EngineRates:
        """Returns the rates, and defaults of those that are not known yet."""
        known = EngineRates()
        prefill = self.prefill_tokens_per_s or known.prefill_tokens_per_s
        if not self.weight:
            return replace(known, prefill_tokens_per_s=prefill)
        mean_rows, mean_s = self.rows / self.weight, self.seconds / self.weight
        spread = self.rows_squared / self.weight - mean_rows * mean_rows
        if self.weight < LEAST_WEIGHT or spread < LEAST_SPREAD:
            # All of what exceeds the shortest is taken as the rows' work: too much of it, rather than too little.
            row_s = max(mean_s - self.least_s, 0.02 * self.least_s) / max(1.0, mean_rows)
            return EngineRates(prefill, self.least_s, row_s)
        slope = (self.rows_seconds / self.weight - mean_rows * mean_s) / spread
        row_s = max(slope, 0.001 * self.least_s)
        return EngineRates(prefill, max(mean_s - row_s * mean_rows, 0.1 * self.least_s), row_s)
