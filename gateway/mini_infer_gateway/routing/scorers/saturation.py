"""Sticky until saturated, then spread: charges an endpoint for work beyond what it does at no one's cost.

The charge is in the unit of `cached_prefix`, tokens over this prompt's tokens, so that with equal weights a hit is
given up exactly when waiting for it costs more than computing the prompt elsewhere. Below the slack there is no charge:
there a hit saves work for the whole cluster and waiting costs next to nothing. Only the excess over the least busy
candidate counts, since a request must go somewhere.
"""

from collections.abc import Sequence

from mini_infer_gateway.routing.base import QUEUED_TOKENS, RUNNING, WAITING, Facts, RoutingRequest

QUEUED_SLACK_TOKENS = 2048
"""About one step's token budget: less is computed in the next step anyway."""
RUNNING_SLACK = 8
"""Requests more than the least busy candidate before decoding in a larger batch is felt."""
RUNNING_CHARGE_TOKENS = 64
WAITING_SLACK = 2
"""Requests that a report may catch between their arrival and their first step."""
WAITING_CHARGE_TOKENS = 256


class Saturation:
    """1 for the least busy, less for who is busier than the slack allows."""

    name = "saturation"
    needs = (QUEUED_TOKENS, RUNNING, WAITING)

    def score(self, request: RoutingRequest, facts: Facts) -> Sequence[float]:
        """See base.Scorer."""
        least_running = min(facts[RUNNING])
        charges = [
            max(0.0, queued - QUEUED_SLACK_TOKENS)
            + max(0.0, running - least_running - RUNNING_SLACK) * RUNNING_CHARGE_TOKENS
            + max(0.0, waiting - WAITING_SLACK) * WAITING_CHARGE_TOKENS
            for queued, running, waiting in zip(facts[QUEUED_TOKENS], facts[RUNNING], facts[WAITING], strict=True)
        ]
        least = min(charges)
        tokens = max(1, request.prompt_tokens)
        return [1.0 - (charge - least) / tokens for charge in charges]
