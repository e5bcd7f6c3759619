"""Shares a limited amount among clients, so that one of them never takes what all others need. Pure.

The rule is that of "Dynamic queue length thresholds for shared-memory packet switches" (Choudhury and Hahne, 1998): a
client may have at most `ALPHA` times what is free. Amounts are large here, not packets, so that what counts is free
after an allocation: each client leaves a fifth of what it finds. One client alone gets four fifths; n greedy ones that
take turns leave a share of 1 / (4 n + 1) to those that come after them.
"""

from collections import Counter
from typing import Final

ALPHA: Final = 4
"""Multiple of what is left free that one client may have."""


def has_room(own: int, used: int, more: int, limit: int) -> bool:
    """True if a client that has `own` of the `used` amount may have `more`."""
    return own + more <= ALPHA * (limit - used - more)


class FairBudget:
    """A limit for what all clients have together."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_client: Counter[str] = Counter()
        self.used = 0

    def take(self, amount: int, client: str = "") -> bool:
        """Allocates an amount for a client; "" is for what no client pays for. Returns False if there is no room; a
        sole allocation always has room.
        """
        if self.used:
            own = self._by_client[client] if client else 0
            if not (has_room(own, self.used, amount, self._limit) if client else self.used + amount <= self._limit):
                return False
        self.charge(amount, client)
        return True

    def charge(self, amount: int, client: str = "") -> None:
        """Allocates an amount that is in use already, whether there is room for it or not."""
        self.used += amount
        if client:
            self._by_client[client] += amount

    def give_back(self, amount: int, client: str = "") -> None:
        """Frees an amount that was allocated for a client."""
        self.used -= amount
        if client:
            self._by_client[client] -= amount
            if not self._by_client[client]:
                del self._by_client[client]

    @property
    def is_tight(self) -> bool:
        """True if more than half is allocated."""
        return 2 * self.used > self._limit
