"""Where the ports of peers listen."""

import pytest

from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_engine.config.peer_ports import PeerPorts, peer_ports

SECRET = PeerSecret(bytes(range(32)))


@pytest.mark.parametrize(
    ("host", "secret", "allow", "listens"),
    [
        ("0.0.0.0", SECRET, False, "0.0.0.0"),
        ("::", SECRET, False, "::"),
        ("0.0.0.0", None, False, "127.0.0.1"),
        ("10.88.0.7", None, False, "127.0.0.1"),
        ("::", None, False, "::1"),
        ("fd00::7", None, False, "::1"),
        ("engine.example", None, False, "127.0.0.1"),
        ("127.0.0.3", None, False, "127.0.0.3"),
        ("::1", None, False, "::1"),
        ("localhost", None, False, "localhost"),
        ("0.0.0.0", None, True, "0.0.0.0"),
    ],
)
def test_ports_listen_on_loopback_when_nothing_proves_membership(
    host: str, secret: PeerSecret | None, allow: bool, listens: str
) -> None:
    ports = peer_ports(host, secret, allow_unauthenticated=allow)
    assert ports.host == listens
    assert ports.secret == secret


def test_peer_keys_are_not_in_any_repr() -> None:
    assert SECRET.hex() not in repr(peer_ports("::", SECRET, allow_unauthenticated=False))
    assert PeerPorts().secret is None
