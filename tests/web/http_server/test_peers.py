"""Connections by peer address: who counts as one, and whose place a new one takes."""

import pytest

from mini_infer_web.api_errors import ApiError
from mini_infer_web.http_server.limits import ConnectionLimits
from mini_infer_web.http_server.peers import Peer, Peers, peer_of


class OpenConnection:
    """A connection that leaves when it is displaced."""

    def __init__(self, peers: Peers, address: str) -> None:
        self.peers, self.is_open = peers, True
        self.peer: Peer = peers.admit(self, address)

    def displace(self) -> None:
        self.is_open = False
        self.peers.release(self, self.peer)


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("local", "local"),
    ],
)
def test_a_peer_is_an_ipv4_address_or_an_ipv6_network(address: str, peer: str) -> None:
    assert peer_of(address) == peer


def test_one_network_takes_only_its_share_when_it_uses_many_ipv6_addresses() -> None:
    peers = Peers(ConnectionLimits(max_connections=100, max_connections_per_peer=4))
    own = [OpenConnection(peers, f"2001:db8::{number:x}") for number in range(10)]
    other = OpenConnection(peers, "2001:db8:0:1::1")
    assert [one.is_open for one in own] == [False] * 6 + [True] * 4
    assert other.is_open
    assert peers.connections == 5


def test_requests_that_are_being_answered_stay_when_a_peer_has_no_more_room() -> None:
    peers = Peers(ConnectionLimits(max_connections=100, max_connections_per_peer=2))
    first, second = OpenConnection(peers, "10.0.0.1"), OpenConnection(peers, "10.0.0.1")
    peers.serve(first, first.peer)
    OpenConnection(peers, "10.0.0.1")
    assert (first.is_open, second.is_open) == (True, False)


def test_a_connection_is_refused_when_all_of_its_peer_have_requests() -> None:
    peers = Peers(ConnectionLimits(max_connections=100, max_connections_per_peer=2))
    for _ in range(2):
        busy = OpenConnection(peers, "10.0.0.1")
        peers.serve(busy, busy.peer)
    with pytest.raises(ApiError) as refused:
        OpenConnection(peers, "10.0.0.1")
    assert (refused.value.status, refused.value.code) == (503, "too_many_connections")
    assert OpenConnection(peers, "10.0.0.2").is_open


def test_nothing_is_kept_of_peers_when_they_have_gone() -> None:
    peers = Peers(ConnectionLimits())
    for number in range(50):
        closed = OpenConnection(peers, f"10.0.0.{number}")
        peers.release(closed, closed.peer)
    assert (peers.connections, peers._peers, peers._waiting) == (0, {}, {})
