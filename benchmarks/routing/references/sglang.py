"""The policies `cache_aware` and `lmetric` of SGLang's router; smg, which came of it, has the first.

Source: sgl-project/sglang, sgl-model-gateway/src/policies/cache_aware.rs (053b63ff) and lmetric.rs (acaa759a).
`cache_aware`: where the loads differ by more than 64 requests and by more than 1.5 times, the least loaded worker; else
the one with the longest match if that is more than 0.3 of the prompt; else the least loaded (the file's head speaks of
the smallest tree, its code does not). `lmetric`: the least product of new prompt work and load + 1, then the least
load, then the least work. Both know prefixes by what they sent, loads by their own requests in flight.
"""

from benchmarks.routing.references.base import SentPrefixes, View
from benchmarks.routing.workload import SimulatedRequest

CACHE_THRESHOLD, BALANCE_ABSOLUTE, BALANCE_RELATIVE = 0.3, 64, 1.5


class CacheAware:
    """The longest match, if it is long, and loads are alike."""

    def __init__(self) -> None:
        self._sent: SentPrefixes | None = None

    def choose(self, request: SimulatedRequest, view: View) -> int:
        """See Policy."""
        sent = self._sent = self._sent or SentPrefixes(view)
        chosen = self._choose(request, view, sent)
        sent.insert(request, chosen)
        return chosen

    def _choose(self, request: SimulatedRequest, view: View, sent: SentPrefixes) -> int:
        numbers, loads = view.numbers(), view.in_flight
        idlest = min(numbers, key=loads.__getitem__)
        least, most = loads[idlest], max(loads[number] for number in numbers)
        if most - least > BALANCE_ABSOLUTE and most > BALANCE_RELATIVE * least:
            return idlest
        matches = {number: sent.matched_tokens(request, number) for number in numbers}
        longest = max(numbers, key=matches.__getitem__)
        return longest if matches[longest] > CACHE_THRESHOLD * request.prompt_tokens else idlest


class LMetric:
    """New prompt work times load."""

    def __init__(self) -> None:
        self._sent: SentPrefixes | None = None

    def choose(self, request: SimulatedRequest, view: View) -> int:
        """See Policy."""
        sent = self._sent = self._sent or SentPrefixes(view)
        costs = []
        for number in view.numbers():
            work, load = request.prompt_tokens - sent.matched_tokens(request, number), view.in_flight[number]
            costs.append((work * (load + 1), load, work, number))
        chosen = min(costs)[-1]
        sent.insert(request, chosen)
        return chosen
