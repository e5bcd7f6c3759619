"""Derives the secrets that prove to endpoints that the gateway belongs to their service. Pure."""

from functools import lru_cache

from mini_infer_contract.launch import Endpoint
from mini_infer_contract.peer_auth import PeerSecret


class PeerKeys:
    """The secrets that are derived from one root secret."""

    def __init__(self, root: PeerSecret | None) -> None:
        self._root = root

    def secret_of(self, endpoint: Endpoint) -> PeerSecret | None:
        """Returns the secret for an endpoint, or None if it requires no proof or there is no root secret."""
        if self._root is None or not endpoint.peer_auth:
            return None
        return self._root if endpoint.peer_auth == "shared" else _derived(self._root, endpoint.service)


@lru_cache(maxsize=4096)
def _derived(root: PeerSecret, service: str) -> PeerSecret:
    return root.for_service(service)
