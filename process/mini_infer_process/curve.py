"""CurveZMQ on the sockets of one service (https://rfc.zeromq.org/spec/26/), with the keys of `peer_auth`.

Without a secret nothing here is used, and a socket stays plain. It knows no message and no address.
"""

import logging
from typing import Any, Final

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from mini_infer_contract.peer_auth import PeerSecret

ZAP_DOMAIN: Final = "mini-infer"


def secure_server(socket: "zmq.Socket[Any]", secret: PeerSecret | None) -> None:
    """Makes the socket a CURVE server, which accepts no client while its context has no `PeerAuthenticator`.

    Call it before `bind`. With None the socket stays as it is.
    """
    if secret is None:
        return
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, secret.curve_keys().server)
    socket.set_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)


def secure_client(socket: "zmq.Socket[Any]", secret: PeerSecret | None) -> None:
    """Makes the socket a CURVE client that talks to servers of this secret alone.

    Call it before `connect`. With None the socket stays as it is.
    """
    if secret is None:
        return
    keys = secret.curve_keys()
    socket.set(zmq.CURVE_SERVERKEY, _public(keys.server))
    socket.set(zmq.CURVE_PUBLICKEY, _public(keys.client))
    socket.set(zmq.CURVE_SECRETKEY, z85.encode(keys.client))


class PeerAuthenticator:
    """Accepts the service's own client key, and no other, at all CURVE servers of one context (ZAP, RFC 27).

    It runs a thread of pyzmq's, which wakes for handshakes alone. Close it before its context is destroyed.
    """

    def __init__(self, context: "zmq.Context[Any]", secret: PeerSecret) -> None:
        self._accepted = _public(secret.curve_keys().client)
        self._authenticator = ThreadAuthenticator(context, log=logging.getLogger("zmq.auth"))
        self._authenticator.start()
        self._authenticator.configure_curve_callback(ZAP_DOMAIN, self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Returns True if a client with this public key (Z85) belongs to the service; pyzmq calls it in its thread."""
        return key == self._accepted

    def close(self) -> None:
        """Stops the thread; from then on no handshake succeeds."""
        self._authenticator.stop()


def _public(secret_key: bytes) -> bytes:
    """Returns the public key of a Curve25519 secret key, in Z85."""
    return zmq.curve_public(z85.encode(secret_key))
