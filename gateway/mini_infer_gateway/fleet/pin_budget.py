"""Limits the tokens that each client pins in engines' KV caches at a time. Pure: times come in."""

from collections import OrderedDict
from heapq import heappop, heappush


class _Pins:
    """The pins of one client."""

    __slots__ = ("ends", "num_tokens", "until_s")

    def __init__(self) -> None:
        self.ends: list[tuple[float, int]] = []
        """A heap of (end, tokens)."""
        self.num_tokens = 0
        self.until_s = float("-inf")
        """The end of the last of them."""


class PinBudget:
    """The pins of all clients that have not ended."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._pins: OrderedDict[str, _Pins] = OrderedDict()
        """The pins by client; those of clients that have pinned nothing for longest come first."""

    def __len__(self) -> int:
        return len(self._pins)

    def take(self, client: str, tokens: int, seconds: float, now_s: float) -> bool:
        """Pins so many tokens. Returns False, and pins nothing, if the client would have too many."""
        while self._pins and next(iter(self._pins.values())).until_s <= now_s:
            self._pins.popitem(last=False)
        pins = self._pins.get(client) or _Pins()
        while pins.ends and pins.ends[0][0] <= now_s:
            pins.num_tokens -= heappop(pins.ends)[1]
        if pins.num_tokens + tokens > self._most_tokens:
            return False
        if tokens:
            heappush(pins.ends, (now_s + seconds, tokens))
            pins.num_tokens += tokens
            pins.until_s = max(pins.until_s, now_s + seconds)
            self._pins[client] = pins
            self._pins.move_to_end(client)
        return True
