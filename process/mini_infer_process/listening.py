"""Listening sockets of both address families: `::` serves IPv4 and IPv6, and means 0.0.0.0 on kernels without IPv6."""

import socket
from contextlib import closing
from ipaddress import ip_address

ANY_HOST = "::"
"""Every address of this machine, of both families."""


def usable_host(host: str) -> str:
    """`host` without brackets, and 0.0.0.0 in place of `::` where IPv6 is missing, as with `ipv6.disable=1`."""
    plain = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    return "0.0.0.0" if plain == ANY_HOST and not has_ipv6() else plain


def has_ipv6() -> bool:
    """True if a socket of both address families can be bound here."""
    try:
        with closing(socket.socket(socket.AF_INET6, socket.SOCK_STREAM)) as probe:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind((ANY_HOST, 0))
    except OSError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Returns True if only this machine can reach what listens at `host`."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def bound_socket(host: str, port: int) -> socket.socket:
    """A TCP socket bound to an address or a name, not listening yet. A name that has both families gets IPv4.

    Raises OSError (socket.gaierror for an unknown name) or OverflowError (no such port) if that cannot be.
    """
    found = socket.getaddrinfo(usable_host(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # the default is net.ipv6.bindv6only
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if address[0] == ANY_HOST else 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def tcp_address(host: str, port: int) -> str:
    """A ZMQ address, with the brackets that IPv6 needs."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
