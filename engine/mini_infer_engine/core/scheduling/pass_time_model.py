"""Estimates how long a pass takes: a line over its decode rows, and a time for each prompt token, both measured.

It knows neither devices nor targets.
"""

from bisect import bisect_right

from mini_infer_engine.core.speculation.pass_times import ReadingTimes

_LEAST_TOKENS = 16
"""Fewest prompt tokens of a pass that says something about the time of one."""
_OLDER_COUNT = 0.9
"""Factor by which each pass with a prompt shrinks the weight of earlier ones."""


class PassTimeModel:
    """The measured speed of one engine."""

    def __init__(self) -> None:
        self._decodes = ReadingTimes()
        self._tokens = self._seconds = 0.0
        """Sums over passes with prompts, in which older passes weigh less: what prompts added to the decode rows."""

    @property
    def is_measured(self) -> bool:
        """True if a pass with a prompt was measured."""
        return self._tokens > 0

    @property
    def token_s(self) -> float:
        """Seconds that each prompt token adds to a pass; 0 before any was measured."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def observe(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        """Records a pass."""
        if not num_prefill_tokens:
            self._decodes.add(num_decodes, seconds)
        elif num_prefill_tokens >= _LEAST_TOKENS:
            self._tokens = _OLDER_COUNT * self._tokens + num_prefill_tokens
            self._seconds = _OLDER_COUNT * self._seconds + max(0.0, seconds - self.decode_s(num_decodes))

    def decode_s(self, num_decodes: int) -> float:
        """Returns the expected seconds of a pass with this many decode rows and nothing else."""
        return max(0.0, self._decodes.seconds(num_decodes))

    def prefill_tokens_within(self, num_decodes: int, seconds: float) -> float:
        """Returns how many prompt tokens fit into a pass of this duration beside the decode rows; negative if even
        these take longer.
        """
        return (seconds - self.decode_s(num_decodes)) / self.token_s if self.token_s else float("inf")

    def decodes_within(self, seconds: float, most: int) -> int:
        """Returns the number of decode rows, up to `most`, whose pass takes no longer than this; 0 if not even one."""
        return bisect_right(range(1, most + 1), seconds, key=self.decode_s)
