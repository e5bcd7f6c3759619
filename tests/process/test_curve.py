"""Sockets of one service prove to each other that they belong to it."""

import pytest
import zmq
import zmq.auth
from zmq.utils.monitor import recv_monitor_message

from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_process.curve import PeerAuthenticator, secure_client, secure_server

SECRET = PeerSecret(bytes(range(32)))
FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


def handshake(
    server_secret: PeerSecret | None, prepare: "object", *, authenticated: bool = True, host: str = "127.0.0.1"
) -> bool:
    """Whether a client that `prepare` makes gets a message through."""
    with zmq.Context() as context, zmq.Context() as elsewhere:
        server, client = context.socket(zmq.ROUTER), elsewhere.socket(zmq.DEALER)
        for socket in (server, client):
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.IPV6, ":" in host)
        secure_server(server, server_secret)
        authenticator = PeerAuthenticator(context, server_secret) if server_secret and authenticated else None
        shown = f"[{host}]" if ":" in host else host
        port = server.bind_to_random_port(f"tcp://{shown}")
        prepare(client)  # type: ignore[operator]
        monitor = client.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | FAILED | zmq.EVENT_DISCONNECTED)
        client.connect(f"tcp://{shown}:{port}")
        client.send(b"hello", zmq.NOBLOCK)  # before a refusal takes the connection away
        assert monitor.poll(20_000), "nothing was said of the handshake"
        event = recv_monitor_message(monitor)["event"]
        arrived = bool(server.poll(2_000 if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else 100))
        assert arrived == (event == zmq.EVENT_HANDSHAKE_SUCCEEDED)
        client.disable_monitor()
        monitor.close(0)
        client.close(0)
        server.close(0)
        if authenticator is not None:
            authenticator.close()
        return arrived


def with_secret(secret: PeerSecret | None) -> "object":
    return lambda socket: secure_client(socket, secret)


def with_own_key(socket: "zmq.Socket[bytes]") -> None:
    """Somebody who has learnt the server's public key, and has a key of his own."""
    secure_client(socket, SECRET)
    public, secret = zmq.curve_keypair()
    socket.set(zmq.CURVE_PUBLICKEY, public)
    socket.set(zmq.CURVE_SECRETKEY, secret)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_peer_gets_in_when_it_has_the_secret(host: str) -> None:
    assert handshake(SECRET, with_secret(SECRET), host=host)


@pytest.mark.parametrize(
    "prepare",
    [with_secret(None), with_secret(SECRET.for_service("a/b")), with_own_key],
    ids=["no keys", "keys of another service", "server's key and a client key of its own"],
)
def test_a_peer_is_refused_when_it_has_not_the_secret(prepare: object) -> None:
    assert not handshake(SECRET, prepare)


def test_nobody_gets_in_when_no_authenticator_runs() -> None:
    assert not handshake(SECRET, with_secret(SECRET), authenticated=False)


def test_a_curve_client_does_not_talk_to_a_server_without_keys() -> None:
    assert not handshake(None, with_secret(SECRET))
