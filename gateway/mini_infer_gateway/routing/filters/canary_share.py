"""Keeps the revision that is to answer a request, while a new one is judged by a share of the requests (a canary).

A session stays with its revision, and a larger share only adds sessions to the canary: the choice is a hash of both. A
canary that is broken or has failed the request is left out; the old revision stands in for it, and a canary for the old
revision only once it answers clients at all.
"""

from collections.abc import Sequence
from hashlib import blake2b

from mini_infer_gateway.routing.base import Candidate, RoutingRequest

_HASH_BYTES = 8


class CanaryShare:
    """Drops the revision that is not to answer the request."""

    name = "canary_share"

    def keep(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Returns the candidates of one side; all candidates if there is no canary, or the request has no session."""
        canary = next((candidate.canary for candidate in candidates if candidate.canary is not None), None)
        if canary is None or not request.session:
            return candidates
        others = [candidate for candidate in candidates if candidate.canary is None]
        if canary.weight and share_point(canary.revision, request.session) < canary.weight:
            able = [one for one in candidates if one.canary is not None and not one.circuit_open]
            return able or others or candidates
        return others or (candidates if canary.weight else ())


def share_point(revision: str, session: str) -> float:
    """Returns a session's point in [0, 1) for this revision: below the canary's share, the canary answers it."""
    digest = blake2b(f"{revision}\0{session}".encode(errors="surrogatepass"), digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest) / (1 << 8 * _HASH_BYTES)
