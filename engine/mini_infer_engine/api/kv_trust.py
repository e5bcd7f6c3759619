"""Decides which senders an engine trusts about KV transfer, on plain data.

A trusted sender may name hosts that the engine takes keys and values from, and have pages retained. Keys and values of
a wrong host end up in the prefix cache that all clients share, so a client's word alone must not be enough.
"""

from typing import Literal

from mini_infer_contract.peer_auth import PeerSecret

KVTransferTrust = Literal["gateway", "clients"]
"""The trusted senders: peers that prove that they belong to the service, or everybody who may send requests."""


def trusts_sender(trust: KVTransferTrust, secret: PeerSecret | None, token: str | None) -> bool:
    """Returns True if a request's own fields about KV transfer count.

    `secret` is the service's, None if the engine knows none: then nobody can prove membership. `token` is the value of
    the request's `PEER_HEADER`.
    """
    return trust == "clients" or (secret is not None and secret.accepts(token))
