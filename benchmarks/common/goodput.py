"""How many requests two fleets of servers keep within targets: shares by load, tables, a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.report import print_table

FLEETS = ("apart", "two unified")


@dataclass(frozen=True, slots=True)
class Grid:
    """Loads of the same shape, and what a request must keep."""

    lengths: tuple[int, ...]
    """Of prompts."""
    loads: tuple[int, ...]
    """Prompt tokens a second."""
    trace_rates: tuple[float, ...]
    """Requests a second."""
    ttft_s: float
    trace_ttft_s: float
    gaps_s: tuple[float, ...]
    """Of 95 % of a request's gaps between tokens: several targets, beside the one for the first token."""

    def cells(self) -> list[tuple[str, tuple[int, int]]]:
        """(label, (length, load)) of each."""
        return [(self.label(length, load), (length, load)) for load in self.loads for length in self.lengths]

    @staticmethod
    def label(length: int, load: int) -> str:
        """A cell's."""
        return f"{length} tokens, {load} a second"


def kept(seen: dict[str, list[float]], ttft_s: float, gap_s: float) -> float:
    """The share of requests within both targets."""
    pairs = list(zip(seen["ttft_s"], seen["gap_p95_s"], strict=True))
    return sum(first_s <= ttft_s and gap <= gap_s for first_s, gap in pairs) / len(pairs)


def show(result: dict[str, Any], grid: Grid) -> None:
    """Shares of good requests, and the break-even length by load, for each target of gaps."""
    for gap_s in grid.gaps_s:
        shares = good_shares(result, grid, gap_s)
        title = f"good share, gaps of {gap_s * 1e3:g} ms"
        print_table([title, *FLEETS], [[label, *both] for label, both in shares.items()])
        for load in grid.loads:
            cells = [shares.get(grid.label(length, load), (None, None)) for length in grid.lengths]
            if all(None not in both for both in cells):
                least = break_even(grid.lengths, cells) or "at no length"
                print(f"break-even at {load} prompt tokens a second: {least}")


def break_even(lengths: Sequence[int], shares: Sequence[tuple[float | None, float | None]]) -> int | None:
    """The least length from which apart keeps as many as unified; shares of both by length."""
    found = None
    for length, (apart, unified) in zip(reversed(lengths), reversed(shares), strict=True):
        if apart is None or unified is None or apart < unified:
            break
        found = length
    return found


def plot(result: dict[str, Any], grid: Grid, path: Path) -> None:
    """Shares of good requests, a panel for each load and one for the trace; a row for each target of gaps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = good_shares(result, grid, grid.gaps_s[0])
    loads = [load for load in grid.loads if any(grid.label(length, load) in measured for length in grid.lengths)]
    size = (4 * (len(loads) + 1), 2.6 * len(grid.gaps_s) + 0.5)
    figure, rows = pyplot.subplots(len(grid.gaps_s), len(loads) + 1, figsize=size, sharey=True, squeeze=False)
    for gap_s, panels in zip(grid.gaps_s, rows, strict=True):
        shares = good_shares(result, grid, gap_s)
        for panel, load in zip(panels, [*loads, None], strict=True):
            if load is None:
                labels = [label for rate in grid.trace_rates if (label := f"{rate:g}/s") in shares]
                names, title = labels, f"Mooncake trace, {grid.trace_ttft_s:g} s and {gap_s * 1e3:g} ms"
            else:
                labels = [grid.label(length, load) for length in grid.lengths]
                names = [f"{length:,}" for length in grid.lengths]
                title = f"{load:,} prompt tokens/s, {grid.ttft_s:g} s and {gap_s * 1e3:g} ms"
            for place, fleet in enumerate(FLEETS):
                heights = [shares.get(label, (None, None))[place] or 0 for label in labels]
                panel.bar([at + 0.4 * place for at in range(len(labels))], heights, width=0.4, label=fleet)
            panel.set_xticks([at + 0.2 for at in range(len(labels))], names)
            panel.set_title(title, fontsize=9)
        panels[0].set_ylabel("share within both")
    figure.legend(*rows[0][0].get_legend_handles_labels(), loc="upper right", ncols=2, fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    figure.savefig(path, dpi=110)


def good_shares(result: dict[str, Any], grid: Grid, gap_s: float) -> dict[str, tuple[float | None, float | None]]:
    """By cell, of both fleets."""
    found: dict[str, tuple[float | None, float | None]] = {}
    for part, ttft_s in (("goodput", grid.ttft_s), ("trace", grid.trace_ttft_s)):
        apart, unified = (result[part].get(name, {}) for name in FLEETS)
        for label in dict.fromkeys([*apart, *unified]):
            one, other = (kept(seen[label], ttft_s, gap_s) if label in seen else None for seen in (apart, unified))
            found[label] = one, other
    return found
