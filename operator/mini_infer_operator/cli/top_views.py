"""Draws the fleet and requests of a gateway's console for a terminal. Pure: JSON in, rich's tables out."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mini_infer_operator.cli.terminal import printable_values

Object = Mapping[str, Any]

MAX_REQUESTS = 100
_BARS = "▁▂▃▄▅▆▇█"
_SERIES = 20
"""Samples in a line of bars."""
_STATES = {"ready": "green", "broken": "bold red", "silent": "bold red"}


def screen(url: str, fleet: Object, requests: Sequence[Object], *, rows: int) -> RenderableType:
    """Returns everything that one frame shows, with at most `rows` requests."""
    fleet, requests = printable_values(fleet), printable_values(list(requests[:rows]))
    parts: list[RenderableType] = [Text(f"{url}: {_summary(fleet)}", style="bold"), _services(fleet["services"])]
    if fleet["engines"]:
        parts.append(_engines(fleet["engines"]))
    parts.append(_requests(requests))
    return Group(*parts)


def _summary(fleet: Object) -> str:
    engines = fleet["engines"]
    if not engines:
        return "services, and requests of this key (an administrator's key shows engines)"
    ready = sum(engine["state"] == "ready" for engine in engines)
    waiting = sum(fleet["waiting_here"].values())
    return f"{ready} of {len(engines)} engines ready, {fleet['in_flight']} requests in flight, {waiting} wait"


def _services(services: Iterable[Object]) -> Table:
    table = _table("SERVICE", "MODEL", "READY", "ROLLOUT")
    for service in services:
        ready = next((one for one in service["status"].get("conditions", ()) if one["type"] == "Ready"), None)
        words = f"{ready.get('reason', '')}: {ready.get('message', '')}".rstrip(": ") if ready else ""
        revisions = service["revisions"]
        rollout = ", ".join(f"{number} of {revision}" for revision, number in revisions.items())
        table.add_row(
            escape(service["name"] or "-"),
            escape(", ".join(service["models"])),
            escape(words or str(service["engines"].get("ready", 0))),
            escape(rollout if len(revisions) > 1 else ""),
        )
    return table


def _engines(engines: Iterable[Object]) -> Table:
    table = _table("ENGINE", "STATE", "RUN", "WAIT", "KV", "HITS", "TOKENS/S", "")
    for engine in engines:
        now = engine["now"] or {}
        state = Text(engine["state"], style=_STATES.get(engine["state"], "yellow"))
        if engine["reason"]:
            state.append(f" {engine['reason']}", style="not bold dim")
        rates = [sample["tokens_per_s"] for sample in engine["history"]]
        table.add_row(
            escape(engine["name"]),
            state,
            str(now.get("running", engine["in_flight"])),
            str(now.get("waiting", 0)),
            f"{now.get('kv_usage', 0.0):.0%}",
            "-" if now.get("hit_share") is None else f"{now['hit_share']:.0%}",
            f"{now.get('tokens_per_s', 0.0):,.0f}",
            bars(rates),
        )
    return table


def _requests(requests: Iterable[Object]) -> Table:
    table = _table("TIME", "MODEL", "OUTCOME", "TOTAL", "FIRST", "PROMPT", "CACHED", "OUTPUT", "KEY", "ENGINE", "WHY")
    for row in requests:
        first = row["first_byte_s"]
        table.add_row(
            datetime.fromtimestamp(row["time"]).astimezone().strftime("%H:%M:%S"),
            escape(row["model"]),
            Text(f"{row['status'] or ''} {row['outcome']}", style="green" if row["outcome"] == "ok" else "red"),
            f"{row['duration_s']:.3f} s",
            "-" if first is None else f"{first:.3f} s",
            str(row["prompt_tokens"]),
            str(row["cached_tokens"]),
            "-" if row["completion_tokens"] is None else str(row["completion_tokens"]),
            escape(row["key"]),
            escape(row["engine"]),
            escape(row["reason"]),
        )
    return table


def bars(values: Sequence[float]) -> str:
    """Returns the last values as a line of bars; the highest is the largest of them."""
    shown = list(values)[-_SERIES:]
    top = max(shown, default=0.0)
    if top <= 0:
        return ""
    return "".join(_BARS[min(len(_BARS) - 1, int(value / top * len(_BARS)))] for value in shown)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold dim", expand=False)
    for column in columns:
        table.add_column(column, no_wrap=column != "STATE")
    return table
