"""Time of short calls on a device."""

import statistics
import time
from collections.abc import Callable

import torch

from mini_infer_engine.tools.tuning.timing import graph_microseconds

__all__ = ["graph_microseconds", "microseconds"]


def microseconds(calls: list[Callable[[], object]], replays: int = 15) -> float:
    """As `graph_microseconds` on a GPU; on a CPU the median of plain calls."""
    if torch.cuda.is_available():
        return graph_microseconds(calls, replays)
    times = []
    for call in calls[:1] * 3 + calls:
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times[1:])
