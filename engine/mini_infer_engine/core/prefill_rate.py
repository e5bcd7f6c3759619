"""How fast prompts are computed: tokens a second of passes with prompt chunks, as measured lately."""

from mini_infer_engine.core.step import Step

_LEAST_TOKENS = 64
"""Of a pass that counts: in smaller ones the weights' way to the cores is what takes time, not the prompt."""
_OLDER_COUNT = 0.8
"""What each pass leaves of those before it, in tokens and seconds alike. Rates are not averaged: where a pass is
computed within its launch, with another launched before it is collected, the last one seems to take no time."""


class PrefillRate:
    """Of one engine. Decode rows in the same passes make it smaller: that is what a prompt would meet."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        """0: not measured yet."""
        self._tokens, self._seconds = 0.0, 0.0
        """Of passes with prompts, the older ones for less."""
        self._free_s = 0.0
        """When the device was last known to have finished a pass."""

    def committed(self, step: Step, now_s: float) -> None:
        """A pass is done."""
        begin_s, self._free_s = max(step.launched_s, self._free_s), now_s
        tokens = sum(row.count for row in step.batch.rows[step.batch.num_decodes :])
        if tokens < _LEAST_TOKENS or now_s <= begin_s:
            return
        self._tokens = _OLDER_COUNT * self._tokens + tokens
        self._seconds = _OLDER_COUNT * self._seconds + now_s - begin_s
        self.tokens_per_s = self._tokens / self._seconds
