"""Maps a request's API key to its client: the fair share, the allowed priority and the cache salt of its requests."""

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import msgspec

from mini_infer_apis.dialects.service_tiers import SERVICE_TIER_PRIORITIES
from mini_infer_gateway.fleet.fair_shares import NO_KEY, Flow
from mini_infer_gateway.paths import EnginePath
from mini_infer_gateway.settings import GatewaySettings
from mini_infer_web.api_keys import ApiKeys, KeyGrant, clamped, grant_of, salted
from mini_infer_web.asgi import Scope
from mini_infer_web.http_server.peers import peer_of


@dataclass(frozen=True, slots=True)
class Client:
    """The rights and properties of all requests with one API key."""

    flow: Flow = NO_KEY
    max_priority: int = 0
    """The lowest number that a request's priority may have: requests with lower numbers go first."""
    salt_of: KeyGrant | None = None
    """The key whose salt separates these requests' prefix cache from all others; None if they share the common cache.
    """
    orders_by_deadline: bool = False
    """True if a request with a shorter queue time-out goes before the other requests of its flow."""
    log_fields: dict[str, str] = field(default_factory=dict)
    """Fields that are added to the log line of each request."""
    opaque_name: bytes = b""
    """The value of CLIENT_HEADER; empty if it depends on the address of the connection."""

    def priority(self, fields: dict[str, Any]) -> int:
        """Returns the effective priority, from vLLM's `priority` or OpenAI's `service_tier`. Lower goes first."""
        requested = _requested_priority(fields)
        return 0 if requested is None else clamped(requested, self.max_priority)

    def rewritten(self, row: EnginePath, body: bytes, fields: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
        """Returns the body and its fields for an engine: with the effective priority and the key's cache salt."""
        if self.salt_of is None and _PRIORITY_FIELDS.isdisjoint(fields):
            return body, fields
        changed: dict[str, Any] = {}
        requested = _requested_priority(fields)
        if requested is not None and (allowed := clamped(requested, self.max_priority)) != requested:
            changed["priority"] = allowed
        own = fields.get("cache_salt")
        if self.salt_of and (row.prompts or row.is_salted) and (own is None or isinstance(own, str)):
            changed["cache_salt"] = salted(self.salt_of, own or "")
        return (with_fields(body, changed), fields | changed) if changed else (body, fields)

    def pays_as(self, scope: Scope) -> str:
        """Returns the name under which a request's memory is counted: that of its key, or of the peer without one."""
        if self.flow.name:
            return f"key {self.flow.name}"
        address = scope.get("client")
        return f"peer {peer_of(address[0])}" if address else ""

    def name_for_engines(self, scope: Scope) -> bytes:
        """Returns the value of CLIENT_HEADER: one value for each name of a key, or for each peer without a key."""
        if self.opaque_name:
            return self.opaque_name
        address = scope.get("client")
        return _opaque(f"peer {peer_of(address[0])}" if address else "local")


_PRIORITY_FIELDS: Final = frozenset(("priority", "service_tier"))
ANYBODY: Final = Client()
GRANT: Final = "mini_infer_key_grant"
"""Key in an ASGI scope: the grant of the request's API key, if it has been looked up already."""


class Clients:
    """Finds the client of each request to one gateway."""

    def __init__(self, settings: GatewaySettings, keys: ApiKeys) -> None:
        self._keys, self._max_priority = keys, settings.max_priority
        self._has_keys = bool(keys)
        self._salts_by_key = settings.cache_salt_by_key
        # An engine with keys salts what comes without a salt by the key that it comes with, which is ours.
        self._own = grant_of(settings.engine_api_key) if settings.engine_api_key else None
        self._anybody = Client(
            max_priority=settings.max_priority, salt_of=self._own, orders_by_deadline=settings.max_priority < 0
        )
        self._cached: dict[bytes, tuple[KeyGrant, Client]] = {}
        """Grants and clients by the hash of their key. A grant is a new object after the file of keys has changed."""

    def of(self, scope: Scope) -> Client:
        """Returns the client of a request that has been authorised."""
        if not self._has_keys:
            return self._anybody
        grant = scope.get(GRANT) or self._keys.grant(scope["headers"])
        if grant is None:
            return self._anybody
        cached = self._cached.get(grant.digest)
        if cached is not None and cached[0] is grant:
            return cached[1]
        if len(self._cached) >= MAX_CACHED_CLIENTS:
            self._cached.clear()
        client = Client(
            Flow(grant.name, grant.weight),
            self._max_priority if grant.max_priority is None else grant.max_priority,
            grant if self._salts_by_key else self._own,
            orders_by_deadline=True,
            log_fields={"key": grant.name},
            opaque_name=_opaque(f"key {grant.name}"),
        )
        self._cached[grant.digest] = grant, client
        return client


@lru_cache(maxsize=4096)
def _opaque(name: str) -> bytes:
    """Returns an opaque name: an engine only distinguishes clients, and needs neither key names nor addresses."""
    return hashlib.blake2b(name.encode(), digest_size=12, person=b"mini-infer").hexdigest().encode()


MAX_CACHED_CLIENTS = 10_000
"""Largest number of cached clients; a file of keys that changes often would exceed it."""


def _requested_priority(fields: dict[str, Any]) -> int | None:
    """Returns the priority that a body requests; None if it has none or no integer, which an engine rejects."""
    if _PRIORITY_FIELDS.isdisjoint(fields):
        return None
    priority = fields.get("priority")
    if priority is None:
        tier = fields.get("service_tier")
        return SERVICE_TIER_PRIORITIES.get(tier) if isinstance(tier, str) else None
    return priority if isinstance(priority, int) and not isinstance(priority, bool) else None


def with_fields(body: bytes, fields: dict[str, Any]) -> bytes:
    """Appends these fields to a JSON object. They replace its own: if a name occurs twice, the last value counts."""
    end = body.rindex(b"}")
    last = end - 1
    while body[last] in b" \t\r\n":
        last -= 1
    comma = b"" if body[last] == ord("{") else b","
    return b"".join((memoryview(body)[:end], comma, msgspec.json.encode(fields)[1:]))
