"""Decides for how long the KV cache of a request is evicted late after its end: by its body, else by the gateway."""

from collections.abc import Mapping
from typing import NamedTuple

from mini_infer_apis.dialects.kv_hints import KVHints
from mini_infer_contract.launch import LEASE_HEADER, MAX_LEASE_S, RETURN_HEADER
from mini_infer_web.api_errors import ApiError

PIN_S = 300.0
"""Seconds of a pin without `ttl_s`."""
DONE_S = -1.0
"""The lease of a session that does not return: its pages are evicted first."""


class KVLease(NamedTuple):
    """The lease of a request's pages."""

    seconds: float = 0.0
    """Seconds after its end; 0 for none."""
    is_pinned: bool = False
    returns_s: float = 0.0
    """Seconds after its end from which its session is expected; 0 if that is not known."""


NO_LEASE = KVLease()


def kv_lease(headers: Mapping[str, str], hints: KVHints | None) -> KVLease:
    """Returns the lease of a request.

    Raises ApiError 400 if a header of the gateway is no number of seconds.
    """
    if hints is not None and hints.done:
        return KVLease(DONE_S)
    is_stated = hints is not None and (hints.pin or hints.ttl_s is not None)
    if hints is not None and is_stated:
        lease = KVLease(PIN_S if hints.ttl_s is None else hints.ttl_s, hints.pin)
    else:
        lease = KVLease(_seconds(headers, LEASE_HEADER))
    returns_s = _seconds(headers, RETURN_HEADER)
    return lease._replace(returns_s=returns_s) if returns_s < lease.seconds else lease


def _seconds(headers: Mapping[str, str], name: str) -> float:
    text = headers.get(name)
    if text is None:
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if 0 <= seconds <= MAX_LEASE_S:
        return seconds
    raise ApiError(
        400,
        f"the header {name} is {text[:40]!r}: send a number of seconds from 0 to {MAX_LEASE_S:g}",
        param=name,
        code="invalid_value",
    )
