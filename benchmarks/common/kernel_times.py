"""Which kernels a GPU was busy with, by torch's profiler, those of replayed CUDA graphs included."""

from collections import defaultdict
from collections.abc import Callable

from common.report import print_table

_NAME_CHARACTERS = 70
_SHOWN = 18


def show_kernel_times(step: Callable[[], object], passes: int) -> dict[str, dict[str, float]]:
    """Microseconds and calls a pass by kernel over `passes` steps; prints the most, the sum, and the time from first
    to last. Steps take longer than without the profiler, kernels do not.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(passes):
            step()
        torch.cuda.synchronize()
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"us": 0.0, "calls": 0.0})
    spans = []
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name]["us"] += event.time_range.elapsed_us() / passes
            found[event.name]["calls"] += 1 / passes
            spans.append(event.time_range)
    most = sorted(found.items(), key=lambda item: -item[1]["us"])
    rows = [[name[:_NAME_CHARACTERS], figures["us"], figures["calls"]] for name, figures in most[:_SHOWN]]
    copies = sum(figures["us"] for name, figures in found.items() if name.startswith("Memcpy"))
    rows.append(["all kernels", sum(figures["us"] for figures in found.values()) - copies, None])
    rows.append(["copies, which may run beside them", copies, None])
    rows.append(["from first to last", (max(s.end for s in spans) - min(s.start for s in spans)) / passes, None])
    print_table(["kernel", "us a pass", "calls"], rows)
    return dict(most)
