"""Decides where an engine's event, replay and transfer ports listen, and what peers must prove there. It opens no
socket.
"""

import msgspec

from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_process.listening import is_loopback


class PeerPorts(msgspec.Struct, frozen=True, kw_only=True):
    """The address and the secret of these ports, which both processes of an engine know."""

    host: str = "127.0.0.1"
    """Address at which these ports listen."""
    key: str = ""
    """The service's secret as 64 hexadecimal digits; "" if peers prove nothing."""

    @property
    def secret(self) -> PeerSecret | None:
        """The service's secret, or None if peers prove nothing."""
        return PeerSecret(bytes.fromhex(self.key)) if self.key else None

    def __repr__(self) -> str:
        return f"PeerPorts(host={self.host!r}, key={'...' if self.key else ''!r})"


def peer_ports(host: str, secret: PeerSecret | None, *, allow_unauthenticated: bool) -> PeerPorts:
    """Returns the address and secret of the ports if the server listens at `host`.

    Without a secret that is a loopback address, unless `allow_unauthenticated`: whoever reaches them reads prompts.
    """
    if secret is not None:
        return PeerPorts(host=host, key=secret.hex())
    if allow_unauthenticated or is_loopback(host):
        return PeerPorts(host=host)
    return PeerPorts(host="::1" if ":" in host else "127.0.0.1")
