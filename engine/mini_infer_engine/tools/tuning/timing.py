"""Times short calls on a GPU."""

import statistics
from collections.abc import Callable, Sequence

import torch


def graph_microseconds(calls: Sequence[Callable[[], object]], replays: int = 15) -> float:
    """Returns the microseconds of a call inside a CUDA graph of all calls, the median of several replays."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return float(statistics.median(times[3:]))
