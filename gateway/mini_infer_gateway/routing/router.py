"""Routes one request to one of many endpoints, and times the plugins and clamps their scores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from time import perf_counter

from mini_infer_gateway.routing.base import (
    CACHED_TOKENS,
    DISK_TOKENS,
    HOST_TOKENS,
    Candidate,
    Decision,
    Features,
    Filter,
    Group,
    Picker,
    Producer,
    RoutingRequest,
    Scorer,
    Standing,
)
from mini_infer_gateway.routing.pairing import Offer, Offers, Pairing, can_prefill, site_of
from mini_infer_gateway.routing.pickers.highest_score import EQUAL
from mini_infer_gateway.routing.seconds import costs_of


@dataclass(slots=True)
class PluginTime:
    """The time that a plugin has taken so far."""

    calls: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Adds one more call."""
        self.calls += 1
        self.seconds += seconds


@dataclass(frozen=True, slots=True)
class Explanation:
    """A decision with everything that it was made of, for people."""

    filtered: Mapping[str, str]
    """The filter that dropped each candidate that may not be chosen, by the candidate's name."""
    candidates: Sequence[Candidate]
    features: Features
    scores: Mapping[str, Sequence[float]]
    """Weighted scores of all candidates, by the name of the scorer."""
    totals: Sequence[float]
    equals: tuple[int, ...]
    """The positions of the best candidates: the picker chooses one of them."""
    decision: Decision | None
    """The decision for the first of them; None if no candidate may be chosen."""


class Router:
    """Runs filters -> producers -> scorers in [0, 1] -> picker."""

    def __init__(
        self,
        filters: Sequence[Filter],
        producers: Sequence[Producer],
        scorers: Sequence[tuple[Scorer, float]],
        picker: Picker,
        random: Random,
        clock: Callable[[], float] = perf_counter,
        pairing: Pairing | None = None,
    ) -> None:
        """`pairing` chooses the engine that computes a prompt; None if each engine computes its own."""
        provided = {table for producer in producers for table in producer.provides}
        for scorer, _ in scorers:
            if missing := set(scorer.needs) - provided:
                raise ValueError(f"scorer {scorer.name} needs {sorted(missing)}: add a producer that provides it")
        self._random, self._clock, self._pairing = random, clock, pairing
        self.times: dict[str, PluginTime] = {}
        """Times by name of the plugin."""
        self._filters = [(plugin, self._time_of(plugin)) for plugin in filters]
        self._producers = [(plugin, self._time_of(plugin)) for plugin in producers]
        self._scorers = [(plugin, weight, self._time_of(plugin)) for plugin, weight in scorers]
        self._picker, self._picker_time = picker, self._time_of(picker)

    def route(self, request: RoutingRequest, candidates: Sequence[Candidate], now_s: float) -> Decision | None:
        """Returns the endpoints for this request; None if no candidate may be chosen. `now_s` is monotonic."""
        decodes = self.eligible(request, candidates)
        if not decodes:
            return None
        features = self._produce(request, decodes, now_s)
        pairing = self._pairing if request.may_split else None
        offers = self._offers(request, candidates, now_s) if pairing else {}
        costs = pairing.with_offers(request, decodes, features, offers) if pairing and offers else features
        scores = self._score(request, costs, len(decodes))
        totals = _totals(scores) if scores else [0.0] * len(decodes)
        chosen = self._pick(decodes, totals)
        decision = self._decide(decodes, features, scores, totals, chosen)
        return pairing.complete(decision, request, decodes, features, chosen, offers, now_s) if pairing else decision

    def explain(self, request: RoutingRequest, candidates: Sequence[Candidate], now_s: float) -> Explanation:
        """Returns what `route` would decide, with every number behind it. Changes neither turns nor random numbers."""
        filtered: dict[str, str] = {}
        left = candidates
        for plugin, _ in self._filters:
            kept = plugin.keep(request, left)
            filtered |= {one.name: plugin.name for one in left if one not in kept}
            left = kept
        if not left:
            return Explanation(filtered, (), {}, {}, (), (), None)
        features = self._produce(request, left, now_s)
        pairing = self._pairing if request.may_split else None
        offers = self._offers(request, candidates, now_s, _first_best) if pairing else {}
        costs = pairing.with_offers(request, left, features, offers) if pairing and offers else features
        rows = self._score(request, costs, len(left))
        totals = _totals(rows) if rows else [0.0] * len(left)
        equals = tuple(position for position, total in enumerate(totals) if max(totals) - total <= EQUAL)
        decision = self._decide(left, features, rows, [*totals], equals[0])
        if pairing:
            decision = pairing.complete(decision, request, left, features, equals[0], offers, now_s)
        names = (plugin.name for plugin, _, _ in self._scorers)
        return Explanation(filtered, left, costs, dict(zip(names, rows, strict=True)), totals, equals, decision)

    def _offers(
        self, request: RoutingRequest, candidates: Sequence[Candidate], now_s: float, pick: "Pick | None" = None
    ) -> Offers:
        """Returns the best prefill engine of each group that has any, by the same scorers and `pick`."""
        groups: dict[Group, list[Candidate]] = {}
        for candidate in candidates:
            if candidate.computes_for_others:
                able = groups.setdefault(candidate.group, [])
                if can_prefill(request, candidate):
                    able.append(candidate)
        pick = pick or self._pick
        return {group: self._offer(request, able, now_s, pick) if able else None for group, able in groups.items()}

    def _offer(self, request: RoutingRequest, able: Sequence[Candidate], now_s: float, pick: "Pick") -> Offer:
        features = self._produce(request, able, now_s)
        scores = self._score(request, features, len(able))
        chosen = pick(able, _totals(scores) if scores else [0.0] * len(able))
        return Offer(able[chosen], site_of(request, features, chosen))

    def eligible(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Returns the candidates that all filters keep."""
        for plugin, time in self._filters:
            started = self._clock()
            candidates = plugin.keep(request, candidates)
            time.add(self._clock() - started)
        return candidates

    def _produce(self, request: RoutingRequest, candidates: Sequence[Candidate], now_s: float) -> Features:
        features: dict[str, Sequence[float]] = {}
        for plugin, time in self._producers:
            started = self._clock()
            features.update(plugin.produce(request, candidates, now_s))
            time.add(self._clock() - started)
        return features

    def _score(self, request: RoutingRequest, features: Features, count: int) -> list[list[float]]:
        """Returns the weighted scores, one row for each scorer."""
        rows = []
        for plugin, weight, time in self._scorers:
            started = self._clock()
            row = _weighted(plugin.score(request, features), weight)
            time.add(self._clock() - started)
            if len(row) != count:
                raise ValueError(f"scorer {plugin.name} gave {len(row)} scores for {count} candidates")
            rows.append(row)
        return rows

    def _pick(self, candidates: Sequence[Candidate], totals: Sequence[float]) -> int:
        started = self._clock()
        chosen = self._picker.pick(candidates, totals, self._random)
        self._picker_time.add(self._clock() - started)
        return chosen

    def _decide(
        self,
        candidates: Sequence[Candidate],
        features: Features,
        scores: list[list[float]],
        totals: list[float],
        chosen: int,
    ) -> Decision:
        candidate = candidates[chosen]
        standing = Standing(candidates, costs_of(totals), features) if scores and len(totals) > 1 else None
        return Decision(
            decode=candidate.endpoint,
            hit_tokens=_tokens(features, CACHED_TOKENS, chosen),
            host_tokens=_tokens(features, HOST_TOKENS, chosen),
            disk_tokens=_tokens(features, DISK_TOKENS, chosen),
            reason=self._reason(scores, totals, chosen),
            index=candidate.index,
            standing=standing,
        )

    def _reason(self, scores: list[list[float]], totals: list[float], chosen: int) -> str:
        """Returns the reason for the choice. Overwrites an entry of `totals`."""
        if len(totals) == 1:
            return "only"
        if not scores:
            return self._picker.name
        totals[chosen] = -inf
        next_best = totals.index(max(totals))
        leads = [row[chosen] - row[next_best] for row in scores]
        largest = max(range(len(leads)), key=leads.__getitem__)
        return self._scorers[largest][0].name if leads[largest] > 1e-9 else "tie"

    def _time_of(self, plugin: Filter | Producer | Scorer | Picker) -> PluginTime:
        return self.times.setdefault(plugin.name, PluginTime())


Pick = Callable[[Sequence[Candidate], Sequence[float]], int]
"""Returns the position of the chosen candidate, by the total scores."""


def _tokens(features: Features, table: str, position: int) -> int:
    return int(features[table][position]) if table in features else 0


def _first_best(candidates: Sequence[Candidate], totals: Sequence[float]) -> int:
    return max(range(len(totals)), key=totals.__getitem__)


def _weighted(values: Sequence[float], weight: float) -> list[float]:
    """Returns the values clamped to [0, 1], times the weight."""
    if values and (min(values) < 0.0 or max(values) > 1.0):
        values = [min(1.0, max(0.0, value)) for value in values]
    return list(values) if weight == 1.0 else [weight * value for value in values]


def _totals(rows: Sequence[list[float]]) -> list[float]:
    """Returns the sum of each candidate's scores over all rows."""
    return list(map(sum, zip(*rows, strict=True)))
