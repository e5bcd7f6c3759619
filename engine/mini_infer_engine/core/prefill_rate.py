"""How fast prompts are computed: tokens a second of passes with prompt chunks, as measured lately."""

from mini_infer_engine.core.scheduler import Step

_LEAST_TOKENS = 64
"""Of a pass that counts: in smaller ones the weights' way to the cores is what takes time, not the prompt."""
_NEWEST_SHARE = 0.2


class PrefillRate:
    """Of one engine. Decode rows in the same passes make it smaller: that is what a prompt would meet."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        """0: not measured yet."""
        self._free_s = 0.0
        """When the device was last known to have finished a pass."""

    def committed(self, step: Step, now_s: float) -> None:
        """A pass is done."""
        begin_s, self._free_s = max(step.launched_s, self._free_s), now_s
        tokens = sum(row.count for row in step.batch.rows[step.batch.num_decodes :])
        if tokens < _LEAST_TOKENS or now_s <= begin_s:
            return
        rate, known = tokens / (now_s - begin_s), self.tokens_per_s
        self.tokens_per_s = rate if not known else known + _NEWEST_SHARE * (rate - known)
