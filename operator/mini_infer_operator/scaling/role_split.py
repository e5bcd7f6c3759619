"""Splits a number of engines between prefill and decode if any of them can have either role. Pure.

Decode engines come first: a request that decodes has its first token, and would lose both targets' worth if it then
waited for each further one. Prompts get the rest. An engine switches its role in milliseconds, and a new one takes a
start, so a split is judged first by the engines that are ready now, and then by all that will be.
"""

from dataclasses import dataclass

ENOUGH = 0.9
"""Share of its need with which a role counts as served: needs have a margin of their own, and engines are whole."""
SWITCH_GAIN = 1.3
"""The factor by which a split must serve a role better for engines to switch: below it they would switch by chance."""
LEAST_NEED = 1e-6


@dataclass(frozen=True, slots=True)
class Part:
    """The engines of one role."""

    need: float
    """Engines that its load needs now."""
    replicas: int
    """Engines that exist or are being started."""
    ready: int
    least: int
    most: int


def split(total: int, prefill: Part, decode: Part, *, may_switch: bool = True) -> tuple[int, int]:
    """Returns how many of `total` engines are for prefill and for decode, within the bounds of both.

    Without `may_switch`, or unless a switch serves a role better by a good part, no engine switches.
    """
    prefill, decode = _as_decided(prefill, decode)
    lowest, highest = max(prefill.least, total - decode.most), min(prefill.most, total - decode.least)
    candidates = [_Candidate(count, total - count, prefill, decode) for count in range(max(0, lowest), highest + 1)]
    if not candidates:
        return _bounded(prefill), _bounded(decode)
    best = max(candidates, key=_Candidate.order)
    still = max((one for one in candidates if not one.switches), key=_Candidate.order, default=best)
    return (best if may_switch and best.is_better_than(still) else still).counts


def _bounded(part: Part) -> int:
    return max(part.least, min(part.most, part.replicas))


def _as_decided(first: Part, second: Part) -> tuple[Part, Part]:
    """Returns the parts with switches that were decided and have not happened yet."""
    pending = min(max(0, first.ready - first.replicas), max(0, second.replicas - second.ready))
    pending -= min(max(0, second.ready - second.replicas), max(0, first.replicas - first.ready))
    return (
        Part(first.need, first.replicas, first.ready - pending, first.least, first.most),
        Part(second.need, second.replicas, second.ready + pending, second.least, second.most),
    )


class _Candidate:
    """One split: the engines of both roles, how many switch for it, and how far both needs are met."""

    __slots__ = ("counts", "served", "switches")

    def __init__(self, prefill_count: int, decode_count: int, prefill: Part, decode: Part) -> None:
        self.counts = prefill_count, decode_count
        grown = prefill_count - prefill.replicas, decode_count - decode.replicas
        self.switches = min(max(0, grown[0]), max(0, -grown[1])) or min(max(0, grown[1]), max(0, -grown[0]))
        moved = self.switches if grown[0] > 0 else -self.switches
        moved = max(-prefill.ready, min(decode.ready, moved))
        self.served = (
            _met(min(decode_count, decode.ready - moved), decode.need),
            _met(min(prefill_count, prefill.ready + moved), prefill.need),
            _met(decode_count, decode.need),
            _met(prefill_count, prefill.need),
        )
        """Needs met now and later, the most important first."""

    def order(self) -> tuple[float | int, ...]:
        """Returns the value by which the best split is the greatest."""
        return (*self.served, -self.switches)

    def is_better_than(self, still: "_Candidate") -> bool:
        """True if it is worth its switches: the first need that differs by a good part is met better."""
        for mine, other in zip(self.served, still.served, strict=True):
            if mine > SWITCH_GAIN * other:
                return True
            if other > SWITCH_GAIN * mine:
                return False
        return False


def _met(engines: int, need: float) -> float:
    return min(1.0, engines / max(LEAST_NEED, ENOUGH * need))
