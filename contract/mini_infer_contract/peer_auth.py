"""Derives the keys by which processes of one service prove to each other that they belong to it from one shared secret.

The operator (or `mini-infer up`) holds a root secret. Each InferenceService gets a secret of its own that is derived
from it, so that a secret that leaks from one namespace opens no other service. Gateways hold the root secret and derive
what they need. From a service's secret every member derives the same CurveZMQ key pairs
(https://rfc.zeromq.org/spec/26/) for ZMQ sockets, and one token for HTTP requests. This module derives keys; it opens
no socket and checks no request.
"""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

PEER_HEADER: Final = "x-mini-infer-peer"
"""HTTP header that carries the service's token to an engine. Gateways strip it from clients."""

SECRET_BYTES: Final = 32
"""Length of every secret here: a Curve25519 key, and the output of HMAC-SHA256."""

PeerAuth = Literal["", "shared", "service"]
"""The credential that an endpoint expects of its peers: none, the gateway's own secret ("shared"), or the secret that
is derived from it for the endpoint's InferenceService ("service").
"""

_HEX = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The secret keys of both ends of a CurveZMQ connection, 32 raw bytes each."""

    server: bytes
    client: bytes


class PeerSecret:
    """A secret of 32 bytes from which everything that a peer proves itself with is derived. Its repr hides it."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        """Raises ValueError if `secret` has not 32 bytes."""
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a peer secret has {SECRET_BYTES} bytes, this one {len(secret)}")
        self._secret = secret

    @classmethod
    def generate(cls) -> "PeerSecret":
        """Returns a new random secret."""
        return cls(secrets.token_bytes(SECRET_BYTES))

    def for_service(self, service: str) -> "PeerSecret":
        """Returns the secret of one InferenceService, named `namespace/name`, that is derived from this root secret."""
        return PeerSecret(self._derive(f"service:{service}"))

    def curve_keys(self) -> CurveKeys:
        """Returns the CurveZMQ secret keys that every member of the service derives alike."""
        return CurveKeys(server=self._derive("curve-server"), client=self._derive("curve-client"))

    def http_token(self) -> str:
        """Returns the value of `PEER_HEADER`: 64 hexadecimal digits."""
        return self._derive("http").hex()

    def accepts(self, token: str | None) -> bool:
        """Returns True if `token` is this secret's HTTP token. The comparison takes constant time."""
        return token is not None and hmac.compare_digest(token.encode("latin-1", "replace"), self.http_token().encode())

    def hex(self) -> str:
        """Returns the secret as 64 hexadecimal digits, which is what a key file holds."""
        return self._secret.hex()

    def _derive(self, purpose: str) -> bytes:
        """HKDF-Expand of RFC 5869 with one block of output; a random secret needs no extraction before it."""
        return hmac.digest(self._secret, b"mini-infer/1/" + purpose.encode() + b"\x01", hashlib.sha256)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PeerSecret) and hmac.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return hash(self._secret)

    def __repr__(self) -> str:
        return "PeerSecret(...)"


def read_peer_secret(file: Path) -> PeerSecret:
    """Reads a key file: 64 hexadecimal digits, with white space around them. `openssl rand -hex 32` writes one.

    Raises ValueError if the file holds anything else, and OSError if it cannot be read.
    """
    text = file.read_text(encoding="ascii", errors="replace").strip()
    if not _HEX.fullmatch(text):
        raise ValueError(f"{file} is no peer key: it must hold 64 hexadecimal digits (`openssl rand -hex 32`)")
    return PeerSecret(bytes.fromhex(text))
