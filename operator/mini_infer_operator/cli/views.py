"""Formats the output of `mini-infer status` and `mini-infer why` from plain objects of the API server. Pure; sends
nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

Object = Mapping[str, Any]

LOG_LINES = 8
_COLUMNS = ("NAMESPACE", "NAME", "READY", "REASON", "ENGINES", "MODEL", "REVISION", "SINCE")


def status_table(services: Iterable[Object], now: datetime) -> list[str]:
    """Returns a line for each service, and below those that are not ready the sentence that says why."""
    rows, notes = [_COLUMNS], dict[int, list[str]]()
    for service in sorted(services, key=lambda item: (item["metadata"]["namespace"], item["metadata"]["name"])):
        metadata, status, ready = service["metadata"], service.get("status") or {}, condition(service, "Ready")
        since = _age(ready.get("lastTransitionTime", metadata.get("creationTimestamp", "")), now)
        cells = (ready.get("status", "Unknown"), ready.get("reason", "NoStatus"), _engines(service))
        model = (status.get("model", "-"), status.get("revision", "-"), since)
        rows.append((metadata["namespace"], metadata["name"], *cells, *model))
        notes[len(rows) - 1] = [sentence(service)] if ready.get("status") != "True" else []
        notes[len(rows) - 1] += canary_lines(service)
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = []
    for number, row in enumerate(rows):
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        lines += [f"    {note}" for note in notes.get(number, ())]
    return lines


def canary_lines(service: Object) -> list[str]:
    """Returns what is known of a revision that is judged, with its figures; none otherwise."""
    canary = (service.get("status") or {}).get("canary") or {}
    if canary.get("phase") != "Running":
        return []
    figures = f"{canary.get('requests', 0)} requests, {canary.get('errors', 0)} failed"
    if canary.get("divergence") is not None:
        figures += f", {canary.get('replays', 0)} answers differ by {canary['divergence']} nats a token"
    head = f"canary {canary.get('revision')} beside {canary.get('stableRevision')}: {canary.get('message', '')}"
    return [f"{head} ({figures})"]


def sentence(service: Object) -> str:
    """Returns the sentence that says why a service is as it is."""
    ready = condition(service, "Ready")
    if not ready:
        return "there is no status: does an operator run, and does it look after this namespace? (kubectl get pods -A)"
    generation = service["metadata"].get("generation", 0)
    seen = (service.get("status") or {}).get("observedGeneration", 0)
    old = "" if seen >= generation else f" (of generation {seen}; the spec is at {generation}: no operator has seen it)"
    return f"{ready.get('message') or ready.get('reason')}{old}"


def explanation(
    service: Object, pods: Sequence[Object], logs: Mapping[str, str], events: Sequence[Object], now: datetime
) -> list[str]:
    """Returns what is known of why a service is as it is: the sentence, conditions, pods, last log lines, Events."""
    metadata, status = service["metadata"], service.get("status") or {}
    ready = condition(service, "Ready")
    lines = [f"{metadata['namespace']}/{metadata['name']}: {ready.get('reason', 'NoStatus')}", f"  {sentence(service)}"]
    if preset := status.get("preset"):
        fields = ", ".join(preset.get("fields", ())) or "no field"
        lines.append(f"  InferencePreset {preset['name']}, generation {preset.get('generation', 0)}, sets {fields}")
    lines += ["", "Conditions"]
    for item in status.get("conditions", ()):
        since = _age(item.get("lastTransitionTime", ""), now)
        lines.append(f"  {item['type']}={item['status']} for {since}: {item['reason']}: {item.get('message', '')}")
    lines += [f"  {line}" for line in canary_lines(service)]
    lines += ["", "Engines"] + [f"  {pod_line(pod, now)}" for pod in pods] + ([] if pods else ["  there are none"])
    for name, text in logs.items():
        last = [line for line in text.splitlines() if line.strip()][-LOG_LINES:]
        lines += ["", f"Last lines of {name}"] + [f"  {line}" for line in last or ["(nothing)"]]
    if events:
        lines += ["", "Events"]
        for event in sorted(events, key=_event_time)[-10:]:
            about = event["involvedObject"]
            lines.append(
                f"  {_age(_event_time(event), now)} ago  {event.get('type')}  {about['kind']} {about['name']}  "
                f"{event.get('reason')}: {' '.join(event.get('message', '').split())}"
            )
    return lines


def pod_line(pod: Object, now: datetime) -> str:
    """Returns a line about one engine: its node, its state, and how often it ended."""
    status = pod.get("status", {})
    conditions = {item["type"]: item["status"] for item in status.get("conditions", ())}
    containers = (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
    waits = [c["state"]["waiting"].get("reason", "") for c in containers if "waiting" in c.get("state", {})]
    state = "terminating" if "deletionTimestamp" in pod["metadata"] else status.get("phase", "Unknown")
    how = "ready" if conditions.get("Ready") == "True" else ", ".join([state, *waits])
    ended = sum(int(c.get("restartCount", 0)) for c in containers)
    node = pod.get("spec", {}).get("nodeName", "no node")
    return f"{pod['metadata']['name']}  {node}  {how}  ended {ended} times  {_age(status.get('startTime', ''), now)}"


def troubled_pods(pods: Sequence[Object]) -> list[tuple[str, bool]]:
    """Returns at most two pods whose logs may say what is wrong, each with True if the log to read is that of the
    previous container.
    """
    found = []
    for pod in pods:
        status = pod.get("status", {})
        conditions = {item["type"]: item["status"] for item in status.get("conditions", ())}
        containers = status.get("containerStatuses", ())
        if conditions.get("Ready") != "True" and any(c.get("restartCount") or c.get("started") for c in containers):
            waiting = any("waiting" in c.get("state", {}) for c in containers)
            found.append((pod["metadata"]["name"], waiting))
    return found[:2]


def condition(service: Object, kind: str) -> Mapping[str, Any]:
    """Returns a condition by its type; an empty mapping if there is none."""
    conditions = (service.get("status") or {}).get("conditions", ())
    return next((item for item in conditions if item["type"] == kind), {})


def _engines(service: Object) -> str:
    """Returns `1/2` for ready and wanted engines; by role if there are several."""
    status = service.get("status") or {}
    by_role = {role["name"]: role.get("ready", "") for role in status.get("roles", ())}
    if len(by_role) > 1:
        return ", ".join(f"{name} {ready}" for name, ready in by_role.items())
    return f"{status.get('readyReplicas', 0)}/{sum(role.get('replicas', 1) for role in _roles(service))}"


def _roles(service: Object) -> list[Mapping[str, Any]]:
    spec = service["spec"]
    return [spec[name] for name in ("unified", "prefill", "decode") if spec.get(name) is not None]


def _event_time(event: Object) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp", ""))


def _age(since: str, now: datetime) -> str:
    """Returns the age as `45s`, `12m`, `3h` or `9d`."""
    try:
        seconds = max(0, int((now - datetime.fromisoformat(since).astimezone(UTC)).total_seconds()))
    except ValueError:
        return "?"
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "m"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds // unit}{name}"
    return f"{seconds // 86_400}d"
