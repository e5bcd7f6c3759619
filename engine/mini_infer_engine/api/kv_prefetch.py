"""Reads a gateway's word that sessions return: POST /kv_prefetch."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from mini_infer_contract.launch import MAX_LEASE_S, MAX_PREFETCHED
from mini_infer_web.api_errors import ApiError

_LONGEST_ID = 256


class AnnouncedSessions(Struct, frozen=True, forbid_unknown_fields=True):
    """Sessions whose next request waits at the gateway."""

    request_ids: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=_LONGEST_ID)]], Meta(min_length=1, max_length=MAX_PREFETCHED)
    ]
    """Ids of their last requests (x-request-id)."""
    ttl_s: Annotated[float, Meta(gt=0, le=MAX_LEASE_S)] = 10.0
    """Seconds within which they are expected: until then their blocks are evicted late."""


def announced_sessions(body: dict[str, Any]) -> AnnouncedSessions:
    """Returns the sessions of a body. Raises ApiError 400, which names the field at fault."""
    try:
        return msgspec.convert(body, AnnouncedSessions)
    except msgspec.ValidationError as error:
        fault, _, path = str(error).partition(" - at `$")
        param = path.strip("`.") or None
        remedy = (
            f'send {{"request_ids": [...], "ttl_s": 10}} with up to {MAX_PREFETCHED} ids of at most {_LONGEST_ID} '
            f"characters, and at most {MAX_LEASE_S:g} seconds"
        )
        raise ApiError(400, f"{fault}: {remedy}", param=param, code="invalid_value") from None
