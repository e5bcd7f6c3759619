"""Formats figures of several schemes for people: as a table, and as a picture of bar charts."""

from collections.abc import Mapping
from pathlib import Path

Figures = Mapping[str, Mapping[str, float]]
"""Figures by scheme and name."""


def table(figures: Figures) -> str:
    """Returns a table with a line for each figure and a column for each scheme."""
    names = list(dict.fromkeys(name for found in figures.values() for name in found))
    lines = [["", *figures], *([name, *(_cell(found.get(name), name) for found in figures.values())] for name in names)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(_padded(line, widths)) for line in lines)


def _padded(line: list[str], widths: list[int]) -> list[str]:
    first, *rest = zip(line, widths, strict=True)
    return [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]


def unknown_picture(path: Path) -> list[str]:
    """Returns the supported file extensions if the path has none of them, else an empty list.

    Raises ImportError if matplotlib is not installed.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    endings = [f".{end}" for end in FigureCanvasBase.get_supported_filetypes()]
    return [] if path.suffix.lower() in ("", *endings) else endings  # without one it is a PNG


def draw(figures: Figures, path: Path) -> None:
    """Draws a small bar chart for each figure. Raises ImportError if matplotlib is not installed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for found in figures.values() for name in found))
    columns = 3
    rows = -(-len(names) // columns)
    picture, axes = pyplot.subplots(rows, columns, figsize=(4 * columns, 2.6 * rows), squeeze=False)
    for place, axis in enumerate(axes.flat):
        if place >= len(names):
            axis.axis("off")
            continue
        values = [found.get(names[place], 0.0) for found in figures.values()]
        bars = axis.bar(list(figures), values, color=f"C{place % 10}")
        axis.bar_label(bars, [_cell(value, names[place]) for value in values], fontsize=7)
        axis.set_title(names[place], fontsize=9)
        axis.tick_params(labelsize=7)
        axis.tick_params("x", rotation=0 if len(figures) <= 4 else 30)
        axis.margins(y=0.2)
    picture.tight_layout()
    picture.savefig(path, dpi=120)
    pyplot.close(picture)


def _cell(value: float | None, name: str) -> str:
    if value is None:
        return "-"
    if name == "top-1 agreement" or name.endswith(" right"):
        return f"{value:.2%}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
