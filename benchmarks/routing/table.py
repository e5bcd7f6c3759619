"""`python -m benchmarks.routing.table RESULTS.json`: a Markdown table, a line a size, beside the best reference."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from benchmarks.routing.figures import Figures
from benchmarks.routing.grid import OURS, Cell, Result, missed_bars


def read(path: Path) -> list[Result]:
    """What `python -m benchmarks.routing --json FILE` wrote; a situation that was stopped in the middle is left out."""
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    results = [Result(_part(Cell, row), row["policy"], _part(Figures, row)) for row in rows]
    most = max(sum(other.cell == result.cell for other in results) for result in results[:1])
    return [result for result in results if sum(other.cell == result.cell for other in results) == most]


def _part(kind: Any, row: dict[str, Any]) -> Any:
    """What older files lack has its default."""
    return kind(**{field.name: row[field.name] for field in fields(kind) if field.name in row})


def lines(results: Sequence[Result]) -> list[str]:
    """Ours at each load: TTFT p90 in seconds (over the best reference's), output (the same), reuse."""
    cells = list(dict.fromkeys(result.cell for result in results))
    loads = sorted({cell.load for cell in cells})
    header = "| workload, engines, cache each | " + " | ".join(f"load {load:g}" for load in loads) + " |"
    table = [header, "|" + "---|" * (len(loads) + 1)]
    for series in dict.fromkeys(replace(cell, load=0.0) for cell in cells):
        name = f"{series.workload}, {series.engines}, {series.cache_tokens // 1000}k"
        name += "" if series.index == "exact" else ", approximate index"
        name += "" if series.gateways == 1 else f", {series.gateways} gateways"
        name += "" if series.fleet == "equal" else f", {series.fleet}"
        columns = [_column(results, replace(series, load=load)) for load in loads]
        table.append(f"| {name} | " + " | ".join(columns) + " |")
    return table


def _column(results: Sequence[Result], cell: Cell) -> str:
    found = {result.policy: result.figures for result in results if result.cell == cell}
    if OURS not in found:
        return ""
    ours = found.pop(OURS)
    ttft = min(other.ttft_p90_s for other in found.values())
    output = max(other.output_tokens_s for other in found.values())
    return (
        f"{ours.ttft_p90_s:.3g} s ({ours.ttft_p90_s / ttft:.2f}), {ours.output_tokens_s:,.0f} "
        f"({ours.output_tokens_s / output:.2f}), {ours.reuse:.0%}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table and what missed its bar."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing.table", description=__doc__)
    parser.add_argument("results", type=Path)
    results = read(parser.parse_args(arguments).results)
    missed = missed_bars(results)
    situations = len({result.cell for result in results})
    print("\n".join([*lines(results), "", f"{situations} situations, {len(missed)} bars missed:", ""]))
    print("\n".join(f"- {text}" for text in missed))


if __name__ == "__main__":
    main()
