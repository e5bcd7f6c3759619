"""Decides who may drain an engine, switch its role or read its cache over HTTP. It works on plain data and answers
nothing.

With a peer secret: only a client that sends its token; behind a mesh's sidecar every client comes from loopback.
Without one: a client that sends the header at all, which no web page can to another origin, and either comes from this
machine by an address (a page that rebinds its own name to it comes by that name) or has an API key.
"""

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mini_infer_contract.launch import DRAIN_PATH, KV_PREFETCH_PATH, KV_SNAPSHOT_PATH, ROLE_PATH
from mini_infer_contract.peer_auth import PEER_HEADER, PeerSecret
from mini_infer_web.api_errors import ApiError
from mini_infer_web.api_keys import ApiKeys

_ACTIONS = {
    DRAIN_PATH: ("POST /drain", "drain"),
    ROLE_PATH: ("POST /role", "role"),
    KV_SNAPSHOT_PATH: ("GET /kv_snapshot", "kv_snapshot"),
    KV_PREFETCH_PATH: ("POST /kv_prefetch", "kv_prefetch"),
}
"""The guarded action of each path, and the beginning of the code of its refusal."""


@dataclass(frozen=True, slots=True)
class AdminGuard:
    """The rules of one engine."""

    secret: PeerSecret | None = None
    keys: ApiKeys | None = None
    """API keys of clients; they have been checked already, but for /drain, which needs none."""
    events_are_open: bool = False
    """True if the event ports accept any peer: then the snapshot, which has the same content, is readable from
    anywhere, and gateways that follow these events may announce requests.
    """

    def proves_membership(self, headers: Mapping[str, str]) -> bool:
        """Returns True if the request comes from a peer of this service; without a secret nobody can prove it."""
        return self.secret is not None and self.secret.accepts(headers.get(PEER_HEADER))

    def refusal(
        self, path: str, headers: Mapping[str, str], raw_headers: Iterable[tuple[bytes, bytes]], peer: str | None
    ) -> ApiError | None:
        """Returns the 403 of a request to a guarded path, or None if it may be served. `peer`: the client's address."""
        action, name = _ACTIONS[path]
        if self.secret is not None:
            if self.proves_membership(headers):
                return None
            message = f"{action} needs the token of this service in the header {PEER_HEADER}, or --admin-socket"
            return ApiError(403, message, code="peer_not_authenticated")
        if PEER_HEADER not in headers:
            message = f"{action} needs the header {PEER_HEADER} (any value), which no web page can send from elsewhere"
            return ApiError(403, message, code="peer_header_missing")
        if self.keys and (path != DRAIN_PATH or self.keys.grant(raw_headers) is not None):
            return None
        if path in (KV_SNAPSHOT_PATH, KV_PREFETCH_PATH) and self.events_are_open:
            return None
        if peer is not None and _is_loopback(peer) and _is_address(headers.get("host", "")):
            return None
        message = (
            f"{action} is answered from the engine's own machine or pod, with an API key where there are any, with "
            "--peer-key-file, or at --admin-socket"
        )
        return ApiError(403, message, code=f"{name}_from_elsewhere")


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _is_address(host_header: str) -> bool:
    """Returns True if a Host header names an IP address or localhost, with or without a port."""
    host = host_header.rpartition(":")[0] if host_header.rpartition(":")[2].isdigit() else host_header
    if host.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
