"""Leases on resources that are retained for another engine until a deadline. Pure: the time is passed in."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

MAX_LEASE_S = 600.0
"""The longest lease in seconds, whatever a peer requests: it bounds how long pages are retained for an engine that
vanished without a message.
"""


@dataclass(slots=True)
class LeaseTable(Generic[Key]):
    """Open leases by key, each with its end in seconds of a monotonic clock."""

    ends_s: dict[Key, float] = field(default_factory=dict)

    def open(self, key: Key, now_s: float, lease_s: float) -> None:
        """Opens a lease of this many seconds from now, at most `MAX_LEASE_S`."""
        self.ends_s[key] = now_s + min(lease_s, MAX_LEASE_S)

    def renew(self, key: Key, now_s: float, lease_s: float) -> None:
        """Extends an open lease to this many seconds from now, at most `MAX_LEASE_S`. It is never shortened, nor
        reopened.
        """
        if key in self.ends_s:
            self.ends_s[key] = max(self.ends_s[key], now_s + min(lease_s, MAX_LEASE_S))

    def close(self, key: Key) -> bool:
        """Ends a lease. Returns False if there was none, or it has expired."""
        return self.ends_s.pop(key, None) is not None

    def has_expired(self, now_s: float) -> bool:
        """Returns True if `expire` would end a lease."""
        return any(end_s <= now_s for end_s in self.ends_s.values())

    def expire(self, now_s: float) -> list[Key]:
        """Ends all leases that are over, and returns their keys."""
        over = [key for key, end_s in self.ends_s.items() if end_s <= now_s]
        for key in over:
            del self.ends_s[key]
        return over

    def __len__(self) -> int:
        return len(self.ends_s)
