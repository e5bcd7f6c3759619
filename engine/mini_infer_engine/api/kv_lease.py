"""Decides for how long the KV cache of a request is evicted late after its end: by its body, else by the gateway."""

from collections.abc import Mapping

from mini_infer_contract.launch import LEASE_HEADER, MAX_LEASE_S
from mini_infer_engine.api.dialects.kv_hints import KVHints
from mini_infer_web.api_errors import ApiError

PIN_S = 300.0
"""Seconds of a pin without `ttl_s`."""
DONE_S = -1.0
"""The lease of a session that does not return: its pages are evicted first."""


def kv_lease(headers: Mapping[str, str], hints: KVHints | None) -> tuple[float, bool]:
    """Returns the seconds of a request's lease, 0 for none, and whether it is pinned.

    Raises ApiError 400 if the gateway's header is no number of seconds.
    """
    if hints is not None and hints.done:
        return DONE_S, False
    if hints is not None and (hints.pin or hints.ttl_s is not None):
        return PIN_S if hints.ttl_s is None else hints.ttl_s, hints.pin
    text = headers.get(LEASE_HEADER)
    if text is None:
        return 0.0, False
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if 0 <= seconds <= MAX_LEASE_S:
        return seconds, False
    raise ApiError(
        400,
        f"the header {LEASE_HEADER} is {text[:40]!r}: send a number of seconds from 0 to {MAX_LEASE_S:g}",
        param=LEASE_HEADER,
        code="invalid_value",
    )
