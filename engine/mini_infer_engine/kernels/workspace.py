"""Scratch memory for kernels whose programs finish each other's work: partial sums and arrival counters.

One a device, shared by all kernels of one stream, which run one after another. Counters are zero between kernels.
"""

from dataclasses import dataclass

import torch

COUNTERS = 1 << 16


@dataclass(slots=True)
class Workspace:
    """Grows before graphs are captured; a captured graph keeps the tensors that it was captured with alive."""

    partials: torch.Tensor  # [floats] fp32, device
    counters: torch.Tensor  # [COUNTERS] int32, device
    outgrown: list[torch.Tensor]
    """Earlier `partials` that captured graphs still write to."""

    @classmethod
    def of(cls, device: torch.device, partials: int) -> "Workspace":
        """The device's workspace with room for `partials` floats."""
        found = _WORKSPACES.get(device)
        if found is None:
            counters = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
            floats = torch.empty(max(partials, 1 << 22), device=device)
            found = _WORKSPACES.setdefault(device, cls(floats, counters, []))
        if found.partials.numel() < partials:
            found.outgrown.append(found.partials)
            found.partials = torch.empty(partials, device=device)
        return found


_WORKSPACES: dict[torch.device, Workspace] = {}
