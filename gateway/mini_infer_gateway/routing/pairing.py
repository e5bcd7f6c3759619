"""Chooses a prefill engine for a decode engine, and decides whether a prompt is worth the transfer.

The prefill engine is chosen before the decode engine, once for each revision that could decode, by the same scorers.
Its offer then counts in the choice of the decode engine: tokens that a decode engine lacks cost no more than their
computation on the prefill engine. The cost formulas are in `prefill_costs`; this module selects the participants.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mini_infer_gateway.fleet.transfer_rates import TransferRates
from mini_infer_gateway.routing.base import (
    AHEAD_TOKENS,
    CACHED_TOKENS,
    DISK_TOKENS,
    PREFILL_RATE,
    QUEUED_TOKENS,
    RUNNING,
    Candidate,
    Decision,
    Features,
    Group,
    PrefillReason,
    RoutingRequest,
)
from mini_infer_gateway.routing.prefill_costs import (
    LEAST_TOKENS,
    Site,
    break_even_tokens,
    delay_price,
    fetched_s,
    first_token_apart_s,
    local_s,
)
from mini_infer_gateway.routing.seconds import load_seconds

LEAST_FETCHED_TOKENS = 256
"""Smallest number of tokens that is worth a request to a peer."""
FETCH_GAIN = 0.8
"""Largest share of the time to compute that fetching may take: the peer has work of its own, and both are estimates."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The prefill engine that a group would use for this prompt."""

    candidate: Candidate
    site: Site


Offers = dict[Group, Offer | None]
"""Offers of all groups that have prefill engines; None if no prefill engine of the group may be chosen now."""


def can_prefill(request: RoutingRequest, candidate: Candidate) -> bool:
    """True if this prefill engine may compute the prompt. Its load reports must arrive, since no client talks to it.

    An open circuit excludes it even if there is no other one: the decode engine can always compute the prompt itself.
    """
    return (
        candidate.ready
        and candidate.reporting
        and not candidate.circuit_open
        and bool(candidate.endpoint.transfer)
        and candidate.name not in request.attempted
    )


def site_of(request: RoutingRequest, features: Features, position: int) -> Site:
    """Returns a candidate as a site that could compute the prompt."""
    rate = features[PREFILL_RATE][position]
    queued = features[QUEUED_TOKENS][position] + features[AHEAD_TOKENS][position]
    missing = max(1.0, request.prompt_tokens - features[CACHED_TOKENS][position])
    return Site(missing, queued / rate, rate, load_seconds(features)[position])


class Pairing:
    """Pairs prefill and decode engines, with the transfer rates learned so far."""

    def __init__(self, transfers: TransferRates, max_local_prefill_tokens: int | None = None) -> None:
        """With `max_local_prefill_tokens`, more missing tokens always use a prefill engine and fewer never do.

        None if the cheaper one is to be chosen.
        """
        self._transfers, self._limit = transfers, max_local_prefill_tokens

    def with_offers(
        self, request: RoutingRequest, decodes: Sequence[Candidate], features: Features, offers: Offers
    ) -> Features:
        """Returns the facts for the choice of a decode engine: missing tokens cost at most what prefill apart takes."""
        cached = list(features[CACHED_TOKENS])
        for position, candidate in enumerate(decodes):
            offer = offers.get(candidate.group)
            if offer is None or not candidate.endpoint.transfer:
                continue
            link_tokens_per_s = self._transfers.tokens_per_s(candidate.name, offer.candidate.name)
            missing = request.prompt_tokens - cached[position]
            apart_s = max(offer.site.load_s + offer.site.busy_s, missing / link_tokens_per_s)
            worth = min(missing, apart_s * features[PREFILL_RATE][position])
            cached[position] = request.prompt_tokens - worth
        return {**features, CACHED_TOKENS: cached}

    def complete(
        self,
        decision: Decision,
        request: RoutingRequest,
        decodes: Sequence[Candidate],
        features: Features,
        chosen: int,
        offers: Offers,
        now_s: float,
    ) -> Decision:
        """Completes the decision for `decodes[chosen]` with the engine that computes its prompt."""
        candidate = decodes[chosen]
        if not candidate.endpoint.transfer:
            return decision
        own, rows = site_of(request, features, chosen), features[RUNNING][chosen]
        price = delay_price(rows, candidate.role or candidate.endpoint.role)
        group = candidate.group
        if group in offers:
            decision = self._paired(decision, own, price, offers[group], now_s)
        if decision.prefill is None:
            decision = self._fetching(decision, own, price, decodes, features, group, now_s)
        return decision

    def _paired(self, decision: Decision, own: Site, price: float, offer: Offer | None, now_s: float) -> Decision:
        if offer is None:
            return replace(decision, prefill_reason="no_prefill_endpoint")
        prefill = offer.candidate.endpoint
        link = self._transfers.link(decision.decode.name, prefill.name, now_s)
        first_token_s = first_token_apart_s(own, offer.site, link)
        reason = self._reason(own.missing_tokens, local_s(own, price), first_token_s)
        even = break_even_tokens(own, offer.site, link, price) if self._limit is None else float(self._limit)
        decision = replace(decision, prefill_reason=reason, break_even_tokens=even)
        if reason not in ("cheaper", "forced"):
            return decision
        tokens = int(offer.site.missing_tokens)
        return replace(decision, prefill=prefill, prefill_tokens=tokens, first_token_s=first_token_s)

    def _reason(self, missing_tokens: float, here_s: float, apart_s: float) -> PrefillReason:
        if self._limit is not None:
            return "forced" if missing_tokens > self._limit else "short"
        if missing_tokens < LEAST_TOKENS:
            return "short"
        return "cheaper" if apart_s < here_s else "dearer"

    def _fetching(
        self,
        decision: Decision,
        own: Site,
        price: float,
        decodes: Sequence[Candidate],
        features: Features,
        group: Group,
        now_s: float,
    ) -> Decision:
        """Adds the peer that has most of the prompt on its device or in main memory, if fetching is cheaper than
        computing. The peer loads what is in main memory before it sends.
        """
        cached = [each - disk for each, disk in zip(features[CACHED_TOKENS], features[DISK_TOKENS], strict=True)]
        peers = [
            position
            for position, peer in enumerate(decodes)
            if cached[position] - decision.hit_tokens >= LEAST_FETCHED_TOKENS
            and peer.endpoint.transfer
            and peer.reporting
            and peer.index == "exact"
            and peer.group == group
        ]
        if not peers:
            return decision
        peer = max(peers, key=cached.__getitem__)
        more_tokens = min(cached[peer] - decision.hit_tokens, own.missing_tokens - 1)
        link = self._transfers.link(decision.decode.name, decodes[peer].endpoint.name, now_s)
        load_s = load_seconds({**features, DISK_TOKENS: [0] * len(cached)})[peer]
        if fetched_s(own, more_tokens, link, price, load_s) >= FETCH_GAIN * local_s(own, price):
            return decision
        return replace(decision, fetch=decodes[peer].endpoint, prefill_reason="fetch")
