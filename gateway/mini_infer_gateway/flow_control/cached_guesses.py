"""Counts a prompt as cached at the endpoints that it is sent to, before their events confirm it."""

from mini_infer_gateway.fleet.registry import Fleet
from mini_infer_gateway.index.prefix_index import PrefixIndex
from mini_infer_gateway.routing.base import Decision, RoutingRequest
from mini_infer_gateway.settings import GatewaySettings


class CachedGuesses:
    """Adds guesses to the prefix index as requests are placed."""

    def __init__(self, settings: GatewaySettings, fleet: Fleet, index: PrefixIndex) -> None:
        self._settings, self._fleet, self._index = settings, fleet, index

    def add(self, request: RoutingRequest, decision: Decision, now_s: float) -> int:
        """Counts the prompt as cached at the decision's endpoints from now on, and returns its number of tokens."""
        prompt = request.prompts.get(self._fleet.endpoints[decision.decode.name].subscriber.assets_revision)
        if prompt is None:
            return 0
        ttl_s = self._settings.guess_ttl_s if decision.index == "exact" else self._settings.approximate_ttl_s
        for chain in prompt.chains:
            for endpoint in decision.endpoints:
                self._index.guess(endpoint.name, chain, now_s + ttl_s)
        return prompt.tokens
