"""Time of short calls on a device."""

import statistics
import time
from collections.abc import Callable

import torch


def graph_microseconds(calls: list[Callable[[], object]], replays: int = 15) -> float:
    """Microseconds a call inside a CUDA graph of all calls, median of several replays."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[3:])


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
