"""What is to be shown on one NVIDIA H200: floors and aims of our figures over the peer's, model by model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.models import MEASURED
from common.report import print_table

_WARM = ((0.60, 0.42), (0.40, 0.22), (0.40, 0.20))
_START = ((0.40, 0.25),) * 3
_RATIOS = {  # figure: (floor, aim) of ours / peer for each of MEASURED
    "itl ms bs 1": ((0.90, 0.80), (0.70, 0.52), (0.65, 0.42)),
    "itl ms bs 32": ((0.93, 0.83), (0.80, 0.60), (0.80, 0.62)),
    "ttft ms 512": ((0.80, 0.65), (0.45, 0.27), (0.45, 0.30)),
    "ttft ms 4096": ((0.97, 0.88), (0.88, 0.73), (0.80, 0.62)),
    "ttft ms 8192": ((1.00, 0.92), (0.97, 0.82), (1.00, 0.80)),
    "warm ms 4096+128": _WARM,
    "warm ms 4000+128": _WARM,
    "w1 tok_s": ((1.02, 1.12), (1.12, 1.40), (1.08, 1.20)),
    "w2 tok_s": ((1.00, 1.03), (1.05, 1.22), (1.05, 1.20)),
    "256 clients, tok_s": ((1.00, 1.04), (1.08, 1.25), (1.10, 1.30)),
    "one client, ttft_ms_p50": ((0.80, 0.65), (0.45, 0.30), (0.50, 0.33)),
    "start, cold, token s": _START,
}


@dataclass(frozen=True, slots=True)
class Target:
    """A bound that a value must keep."""

    floor: float
    at_least: bool = False
    aim: float | None = None

    def verdict(self, value: float) -> str:
        """A word for a table."""
        if not self._reaches(value, self.floor):
            return "FAIL"
        return "aim" if self.aim is not None and self._reaches(value, self.aim) else "pass"

    def _reaches(self, value: float, bound: float) -> bool:
        return value >= bound if self.at_least else value <= bound

    def __str__(self) -> str:
        aim = "" if self.aim is None else f" (aim {self.aim:g})"
        return f"{'>=' if self.at_least else '<='} {self.floor:g}{aim}"


def is_rate(figure: str) -> bool:
    """Whether more is better."""
    return figure.endswith("tok_s")


def ratio_target(model: str, figure: str) -> Target | None:
    """The target of ours / peer; None where there is none."""
    if model not in MEASURED or figure not in _RATIOS:
        return None
    floor, aim = _RATIOS[figure][MEASURED.index(model)]
    return Target(floor, is_rate(figure), aim)


def verdict_cells(target: Target | None, value: float | None) -> list[Any]:
    """Two cells: the target, and whether the value keeps it."""
    return [target and str(target), None if target is None or value is None else target.verdict(value)]


def print_verdicts(title: str, values: Mapping[str, float], targets: Mapping[str, Target]) -> None:
    """A table of those values that have a target."""
    rows = [[name, value, *verdict_cells(targets[name], value)] for name, value in values.items() if name in targets]
    if rows:
        print_table([title, "value", "target", ""], rows)
