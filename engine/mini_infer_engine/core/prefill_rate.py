"""Measures the speed of prefill: tokens a second of recent passes with prompt chunks."""

from mini_infer_engine.core.step import Step

_LEAST_TOKENS = 64
"""Least prompt tokens of a pass that counts: smaller ones spend their time on loading weights, not on the prompt."""
_OLDER_COUNT = 0.8
"""Factor by which each pass shrinks the weight of earlier ones, in tokens and seconds alike. Rates are not averaged:
where a pass is computed within its launch, with another launched before it is collected, the last one seems to take no
time.
"""


class PrefillRate:
    """The prefill rate of one engine. Decode rows in the same passes lower it, as a prompt would experience."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        """The measured rate; 0 before the first measurement."""
        self._tokens, self._seconds = 0.0, 0.0
        """Sums over passes with prompts, in which older passes weigh less."""
        self._free_s = 0.0
        """Time at which the device was last known to have finished a pass."""

    def committed(self, step: Step, now_s: float) -> None:
        """Records a finished pass."""
        begin_s, self._free_s = max(step.launched_s, self._free_s), now_s
        tokens = sum(row.count for row in step.batch.rows[step.batch.num_decodes :])
        if tokens < _LEAST_TOKENS or now_s <= begin_s or step.loading_layerwise:  # that has waited for a load
            return
        self._tokens = _OLDER_COUNT * self._tokens + tokens
        self._seconds = _OLDER_COUNT * self._seconds + now_s - begin_s
        self.tokens_per_s = self._tokens / self._seconds
