"""Limits the tokens that each client pins in engines' KV caches at a time. Pure: times come in."""

from collections import deque


class PinBudget:
    """The pins of all clients that have not ended."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._pins: dict[str, deque[tuple[float, int]]] = {}
        """(end, tokens) of each client's pins, in the order in which they began."""

    def take(self, client: str, tokens: int, seconds: float, now_s: float) -> bool:
        """Pins so many tokens. Returns False, and pins nothing, if the client would have too many."""
        pins = self._pins.setdefault(client, deque())
        live = deque(pin for pin in pins if pin[0] > now_s)
        fits = sum(count for _, count in live) + tokens <= self._most_tokens
        if fits:
            live.append((now_s + seconds, tokens))
        if live:
            self._pins[client] = live
        else:
            del self._pins[client]
        return fits
