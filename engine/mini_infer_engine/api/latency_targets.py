"""Reads the latency targets of a request: fields of its body, or else headers, or else the server's defaults."""

from collections.abc import Mapping

import msgspec

from mini_infer_contract.launch import MAX_TARGET_MS, QUEUED_MS_HEADER, TARGET_HEADERS
from mini_infer_engine.core.request import NO_TARGETS, LatencyTargets
from mini_infer_web.api_errors import ApiError


def latency_targets(
    headers: Mapping[str, str], fields: Mapping[str, float], defaults: LatencyTargets, arrived_s: float
) -> LatencyTargets:
    """Returns the targets of a request that arrived at this monotonic time: its body's, else its headers', else the
    server's. They count from its arrival at the gateway, if one has said how long the request took there.

    Raises ApiError 400 if a header is no number of milliseconds.
    """
    stated = {name: _milliseconds(headers, header) for name, header in TARGET_HEADERS.items()} | dict(fields)
    targets = LatencyTargets(
        ttft_ms=stated["ttft_ms"], itl_ms=stated["itl_ms"], deadline_ms=stated["deadline_ms"]
    ).or_defaults(defaults)
    if targets == NO_TARGETS:
        return NO_TARGETS
    queued_ms = _milliseconds(headers, QUEUED_MS_HEADER, low_is_allowed=True) or 0.0
    return msgspec.structs.replace(targets, since_s=arrived_s - queued_ms / 1000)


def _milliseconds(headers: Mapping[str, str], name: str, *, low_is_allowed: bool = False) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if (value > 0 or (low_is_allowed and value == 0)) and value <= MAX_TARGET_MS:
        return value
    raise ApiError(
        400,
        f"the header {name} is {text[:40]!r}: send a number of milliseconds above 0 and up to {MAX_TARGET_MS}",
        param=name,
        code="invalid_value",
    )
