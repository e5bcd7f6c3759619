"""How long a pass of an engine takes, from measured figures. Does not depend on the simulation."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class PassRates:
    """Coefficients of a pass's time in milliseconds. A pass computes all its rows' tokens and reads the KV cache."""

    weights_ms: float
    """Reading all weights once: the least that a pass takes."""
    token_ms: float
    """Computing one token where the tensor cores are the limit."""
    row_ms: float
    """A decode row's own work: sampling, attention's launch, the host's part."""
    kv_token_ms: float
    """Reading one cached token for a decode row's attention."""
    pair_ms: float
    """Attention of one new token of a prompt to one earlier token."""

    def at_speed(self, speed: float) -> "PassRates":
        """Returns the rates of an engine that does everything `speed` times as fast."""
        return PassRates(*(getattr(self, field.name) / speed for field in fields(self)))

    def pass_s(self, decode_rows: int, kv_tokens: int, prefill_tokens: int, prefill_pairs: float) -> float:
        """Seconds of one pass with these rows; `kv_tokens` is the sum of the decode rows' contexts."""
        products = max(self.weights_ms, self.token_ms * (decode_rows + prefill_tokens))
        attention = self.kv_token_ms * kv_tokens + self.pair_ms * prefill_pairs
        return (products + self.row_ms * decode_rows + attention) / 1000

    def decodes_s(self, decode_rows: int, kv_tokens: int, steps: int) -> float:
        """Seconds of `steps` passes of decode rows alone; each pass lengthens every context by one token."""
        grown = decode_rows * steps * (steps - 1) // 2
        per_step = max(self.weights_ms, self.token_ms * decode_rows) + self.row_ms * decode_rows
        return (steps * per_step + self.kv_token_ms * (steps * kv_tokens + grown)) / 1000


QWEN_7B_H200 = PassRates(weights_ms=3.6, token_ms=0.0211, row_ms=0.0135, kv_token_ms=1.5e-5, pair_ms=2.0e-7)
"""qwen2.5-7b on one NVIDIA H200, fitted to benchmarks/results (c62bd2d and before): prompts of 4,096 and 8,192 tokens
in 89.7 and 186 ms, one token for 1, 8 and 32 rows at 512 tokens in 3.64, 3.75 and 4.30 ms, for 8 rows at 4,096 in
4.18."""
