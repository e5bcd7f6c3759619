"""The field `kv_hints`: a client's words on when its session returns, in requests and in POST /v1/kv_hints."""

from typing import Annotated, Final

from msgspec import Meta, Struct

from mini_infer_contract.launch import MAX_LEASE_S

KV_HINTS_PATH: Final = "/v1/kv_hints"


class KVHints(Struct, frozen=True, forbid_unknown_fields=True):
    """A client's statement on the session's next request."""

    pin: bool = False
    """True if the session's blocks are to be evicted after those of all sessions that are not pinned."""
    ttl_s: Annotated[float, Meta(gt=0, le=MAX_LEASE_S)] | None = None
    """Seconds after the answer's end within which the session returns."""
    done: bool = False
    """True if the session does not return, so that its blocks are evicted first."""
