"""Formats the log line of throughput from the counters at two moments."""

from mini_infer_engine.core.stats import EngineStats


class Throughput:
    """Keeps the counters of the last line."""

    def __init__(self) -> None:
        self._last = EngineStats()
        self._last_generation_tokens = 0

    def line(self, stats: EngineStats, generation_tokens: int, interval_s: float) -> str | None:
        """Returns the line for the last `interval_s` seconds, or None if nothing happened."""
        prompt = stats.prompt_tokens - self._last.prompt_tokens
        cached = stats.cached_prompt_tokens - self._last.cached_prompt_tokens
        generated = generation_tokens - self._last_generation_tokens
        self._last, self._last_generation_tokens = stats, generation_tokens
        if not (prompt or generated or stats.running or stats.waiting):
            return None
        return (
            f"prompt {prompt / interval_s:.0f} tok/s, generation {generated / interval_s:.0f} tok/s, "
            f"running {stats.running}, waiting {stats.waiting}, KV cache {stats.kv_usage:.1%}, "
            f"prefix hits {cached / prompt if prompt else 0:.0%}"
        )
