"""Draws the Grafana dashboards as PNG files from a Prometheus, where no Grafana is at hand (docs/dashboards.md).

usage: draw_dashboards.py http://127.0.0.1:9090 docs/pictures [MINUTES]

It shows each panel's queries over the last minutes, as Grafana does with every variable at All. It says which queries
failed or found nothing, and ends with 1 if one failed.
"""

import json
import re
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from PIL import Image

FOLDER = Path(__file__).parents[1] / "charts/mini-infer/dashboards"
STEPS = 120
ROW_INCHES = 0.27
"""Of Grafana's grid; a panel keeps half an inch for its title and its axis."""
MARGIN_INCHES = 0.4
UNITS = {"s": "s", "percentunit": "%", "reqps": "1/s", "ops": "1/s", "short": ""}
Series = list[tuple[str, list[float], list[float]]]


def query_range(prometheus: str, query: str, minutes: float) -> list[dict[str, Any]]:
    """A range query; RuntimeError with Prometheus' own words."""
    end = time.time()
    values = {"query": query, "start": end - minutes * 60, "end": end, "step": max(1.0, minutes * 60 / STEPS)}
    try:
        with urllib.request.urlopen(f"{prometheus}/api/v1/query_range?{urllib.parse.urlencode(values)}") as answer:
            return list(json.load(answer)["data"]["result"])
    except urllib.error.HTTPError as error:
        raise RuntimeError(json.load(error)["error"]) from None


def series_of(prometheus: str, target: dict[str, Any], minutes: float) -> Series:
    """Label, minutes and values of each line of one query."""
    query = re.sub(r'=~"\$\w+"', '=~".*"', target["expr"]).replace("$__rate_interval", "30s")
    lines = []
    for found in query_range(prometheus, query, minutes):
        label = re.sub(
            r"\{\{(\w+)\}\}", lambda name, m=found["metric"]: str(m.get(name[1], "")), target["legendFormat"]
        )
        moments, values = zip(*((float(t), float(v)) for t, v in found["values"]), strict=True)
        lines.append((label, [(moment - time.time()) / 60 for moment in moments], list(values)))
    return lines


def draw_panel(axes: Any, panel: dict[str, Any], lines: Series) -> None:
    """Lines over time, or numbers for a stat panel."""
    unit = panel["fieldConfig"]["defaults"]["unit"]
    factor = 100.0 if unit == "percentunit" else 1.0
    axes.set_title(panel["title"] + (f" [{UNITS[unit]}]" if UNITS[unit] else ""), fontsize=8, loc="left")
    if panel["type"] == "stat":
        axes.axis("off")
        text = "\n".join(f"{values[-1] * factor:.4g}  {label}" for label, _, values in lines) or "no data"
        axes.text(0.5, 0.45, text, ha="center", va="center", fontsize=13, color="#1f6f3f")
        return
    axes.tick_params(labelsize=6)
    axes.grid(alpha=0.25)
    for label, moments, values in lines:
        axes.plot(moments, [value * factor for value in values], label=label, linewidth=1)
    axes.set_ylim(bottom=0)
    if not lines:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", fontsize=8, color="grey")
    elif len(lines) <= 8:
        axes.legend(fontsize=5, loc="upper left", framealpha=0.5)


def draw(prometheus: str, path: Path, out: Path, minutes: float) -> int:
    """One dashboard to one picture; how many queries failed."""
    dashboard = json.loads(path.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = plt.figure(figsize=(12, height * ROW_INCHES + MARGIN_INCHES))
    figure.suptitle(dashboard["title"], fontsize=10, x=0.02, y=0.995, ha="left", va="top")
    failed = 0
    for panel in panels:
        place = panel["gridPos"]
        whole = height * ROW_INCHES + MARGIN_INCHES
        bottom = (height - place["y"] - place["h"]) * ROW_INCHES + 0.25
        box = (place["x"] / 24 + 0.025, bottom / whole)
        size = (place["w"] / 24 - 0.035, (place["h"] * ROW_INCHES - 0.5) / whole)
        lines: Series = []
        for target in panel["targets"]:
            try:
                lines += series_of(prometheus, target, minutes)
            except RuntimeError as error:
                failed += 1
                print(f"{path.stem}: {panel['title']}: {error}\n  {target['expr']}")
        if not lines:
            print(f"{path.stem}: {panel['title']}: no data")
        draw_panel(figure.add_axes((*box, *size)), panel, lines)
    picture = out / f"{path.stem}.png"
    figure.savefig(picture, dpi=80)
    plt.close(figure)
    with Image.open(picture) as image:
        image.convert("RGB").quantize(32).save(picture, optimize=True)  # a third of the size
    return failed


def main() -> int:
    """Draw all of them."""
    prometheus, out = sys.argv[1].rstrip("/"), Path(sys.argv[2])
    minutes = float(sys.argv[3]) if len(sys.argv) > 3 else 10.0
    out.mkdir(parents=True, exist_ok=True)
    return min(1, sum(draw(prometheus, path, out, minutes) for path in sorted(FOLDER.glob("*.json"))))


if __name__ == "__main__":
    sys.exit(main())
