"""Detects outputs that repeat themselves: vLLM's `repetition_detection`, by token ids."""

from collections.abc import Sequence

from mini_infer_engine.core.request import RepetitionDetectionParams

REPETITION = "repetition_detected"
"""The `stop_reason` of an output that repeats itself; vLLM's word."""


def repeats(token_ids: Sequence[int], params: RepetitionDetectionParams) -> bool:
    """Returns True if the last tokens are a pattern that occurs `min_count` times in a row there."""
    sizes = range(max(1, params.min_pattern_size), params.max_pattern_size + 1)
    return any(size * params.min_count <= len(token_ids) and _repeats(token_ids, size, params) for size in sizes)


def _repeats(token_ids: Sequence[int], size: int, params: RepetitionDetectionParams) -> bool:
    end = len(token_ids)
    pattern = token_ids[end - size :]
    starts = range(end - params.min_count * size, end - size, size)
    return all(token_ids[start : start + size] == pattern for start in starts)
