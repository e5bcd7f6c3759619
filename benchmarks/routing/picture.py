"""`python -m benchmarks.routing.picture RESULTS.json PICTURE.svg`: time to the first token and output over the load.

Draws one workload at one size, all policies that are in the file.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams["svg.fonttype"] = "none"
mpl.rcParams["svg.hashsalt"] = "routing"

from matplotlib import pyplot as plt  # noqa: E402  # after the backend is chosen

COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#7f7f7f", "#bcbd22")


def draw(rows: Sequence[dict[str, Any]], title: str, out: Path) -> None:
    """Two panels side by side; the first policy of the file is drawn bold."""
    figure, (wait, output) = plt.subplots(1, 2, figsize=(9.6, 3.6), layout="constrained")
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    for policy, colour in zip(policies, COLOURS, strict=False):
        own = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["load"])
        style = {"color": colour, "marker": "o", "markersize": 3, "linewidth": 2.4 if policy == policies[0] else 1.2}
        loads = [row["load"] for row in own]
        wait.plot(loads, [row["ttft_p90_s"] for row in own], label=policy, **style)
        output.plot(loads, [row["output_tokens_s"] for row in own], label=policy, **style)
    wait.set(yscale="log", xlabel="offered load / capacity", ylabel="TTFT p90, s", title="time to the first token")
    output.set(ylim=(0, None), xlabel="offered load / capacity", ylabel="tokens/s", title="output")
    for panel in (wait, output):
        panel.grid(alpha=0.3)
    output.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(out, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads, picks one situation, draws."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing.picture", description=__doc__)
    parser.add_argument("results", type=Path, help="what `python -m benchmarks.routing --json FILE` wrote")
    parser.add_argument("picture", type=Path, help="an .svg file")
    parser.add_argument("--workload", default="mooncake")
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--cache-tokens", type=int, default=500_000)
    options = parser.parse_args(arguments)
    selected = {"workload": options.workload, "engines": options.engines, "cache_tokens": options.cache_tokens}
    selected |= {"index": "exact", "gateways": 1}
    rows = [row for row in json.loads(options.results.read_text()) if selected.items() <= row.items()]
    if not rows:
        raise SystemExit(f"{options.results} has nothing for {selected}")
    draw(rows, f"{options.workload}, {options.engines} engines of {options.cache_tokens:,} tokens", options.picture)


if __name__ == "__main__":
    main()
