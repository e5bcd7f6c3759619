"""Leases: what is promised to another engine, until when. Pure, with the time passed in."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

MAX_LEASE_S = 600.0
"""The longest lease, whoever asks for it: so long does an engine that went without a word keep pages of another one."""


@dataclass(slots=True)
class LeaseTable(Generic[Key]):
    """Open leases and when they end, in seconds of a monotonic clock."""

    ends_s: dict[Key, float] = field(default_factory=dict)

    def open(self, key: Key, now_s: float, lease_s: float) -> None:
        """Promise something for so long from now, and for `MAX_LEASE_S` at most."""
        self.ends_s[key] = now_s + min(lease_s, MAX_LEASE_S)

    def renew(self, key: Key, now_s: float, lease_s: float) -> None:
        """Promise it for so long from now, where it is still promised; a lease is never made shorter."""
        if key in self.ends_s:
            self.ends_s[key] = max(self.ends_s[key], now_s + min(lease_s, MAX_LEASE_S))

    def close(self, key: Key) -> bool:
        """End a lease. False: there was none, or it has expired."""
        return self.ends_s.pop(key, None) is not None

    def has_expired(self, now_s: float) -> bool:
        """Whether `expire` would end any."""
        return any(end_s <= now_s for end_s in self.ends_s.values())

    def expire(self, now_s: float) -> list[Key]:
        """End those whose time is over, and tell which."""
        over = [key for key, end_s in self.ends_s.items() if end_s <= now_s]
        for key in over:
            del self.ends_s[key]
        return over

    def __len__(self) -> int:
        return len(self.ends_s)
