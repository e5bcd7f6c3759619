"""Addresses of engines that may have the weights. No torch here."""

import logging
import random
import socket
from collections.abc import Sequence

from mini_infer_process.listening import tcp_address

log = logging.getLogger(__name__)


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of `host:port`, `tcp://host:port` or `[v6]:port`. Raises ValueError if it is none."""
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError(f"weights-peers: {address!r} is no address: write HOST:PORT")
    return host, int(port)


def zmq_address(host: str, port: int) -> str:
    """Returns the address of a control socket."""
    return tcp_address(host, port)


def resolved_peers(addresses: Sequence[str], most: int) -> list[tuple[str, int]]:
    """Returns hosts and ports of the engines that the names resolve to, at most so many, in random order.

    A name that does not resolve has none, as that of a service without an engine that is ready.
    """
    found: set[tuple[str, int]] = set()
    for address in addresses:
        host, port = split_address(address)
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            log.info("weights: %s has no address (%s)", host, error)
            continue
        found.update((str(entry[4][0]), port) for entry in entries)
    chosen = list(found)
    random.shuffle(chosen)
    return chosen[:most]
