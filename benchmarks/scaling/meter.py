"""Measures how fast engines are, pass by pass, as engines and gateways do: the planner knows no other rates."""

from dataclasses import dataclass, field

from benchmarks.routing.rates import PassRates
from mini_infer_operator.scaling.signals import EngineRates

FORGET = 0.9998
"""The weight of the past for each pass. With ten engines that is half a minute; the operator's rates (scaling/rates.py)
remember a hundred seconds.
"""


@dataclass(slots=True)
class Meter:
    """Sums over the latest passes of all engines of a fleet."""

    prefill_tokens: float = 0.0
    prefill_s: float = 0.0
    rows: float = 0.0
    rows_s: float = 0.0
    least_pass_s: float = 1.0

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Takes a pass's prompt tokens, and the seconds by which they lengthened it."""
        self.prefill_tokens = FORGET * self.prefill_tokens + tokens
        self.prefill_s = FORGET * self.prefill_s + seconds

    def decoded(self, rows: int, pass_s: float) -> None:
        """Takes a pass of decoding requests alone."""
        self.least_pass_s = min(self.least_pass_s, pass_s)
        self.rows = FORGET * self.rows + rows
        self.rows_s = FORGET * self.rows_s + pass_s - self.least_pass_s

    def rates(self) -> EngineRates:
        """Returns what was measured, and defaults of what was not yet."""
        known = EngineRates()
        return EngineRates(
            self.prefill_tokens / self.prefill_s if self.prefill_s > 0 else known.prefill_tokens_per_s,
            self.least_pass_s if self.rows else known.pass_s,
            max(1e-6, self.rows_s / self.rows) if self.rows else known.row_s,
        )


@dataclass(frozen=True, slots=True)
class MeteredRates(PassRates):
    """Rates of a model of an engine whose passes are measured."""

    meter: Meter = field(default_factory=Meter)

    def pass_s(self, decode_rows: int, kv_tokens: int, prefill_tokens: int, prefill_pairs: float) -> float:
        """Returns the seconds of a pass."""
        seconds = PassRates.pass_s(self, decode_rows, kv_tokens, prefill_tokens, prefill_pairs)
        alone_s = PassRates.pass_s(self, decode_rows, kv_tokens, 0, 0.0) if decode_rows else 0.0
        if prefill_tokens:
            self.meter.prefilled(prefill_tokens, seconds - alone_s)
        return seconds

    def decodes_s(self, decode_rows: int, kv_tokens: int, steps: int) -> float:
        """Returns the seconds of some passes of decoding requests alone."""
        seconds = PassRates.decodes_s(self, decode_rows, kv_tokens, steps)
        self.meter.decoded(decode_rows, seconds / steps)
        return seconds
