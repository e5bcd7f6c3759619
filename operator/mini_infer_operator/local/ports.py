"""Finds free ports on this machine."""

import errno
import random
import socket
from pathlib import Path

HOST = "127.0.0.1"
_LOWEST = 15_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Returns different ports on which nothing listens now. Raises RuntimeError if all are taken.

    They are outside the kernel's range for outgoing connections: such a connection could take a port before a server
    listens on it, or while that server restarts.
    """
    found: list[int] = []
    for port in random.sample(range(_LOWEST, _first_ephemeral()), k=_first_ephemeral() - _LOWEST):
        if len(found) == count:
            break
        if _is_free(port):
            found.append(port)
    if len(found) < count:
        raise RuntimeError(f"{count} ports are needed, and of {_LOWEST} to {_first_ephemeral() - 1} all are taken")
    return found


def free_port_range(count: int) -> int:
    """Returns the first of so many ports in a row on which nothing listens now. Raises RuntimeError if there are none.

    They are outside the kernel's range for outgoing connections, as those of `free_ports`.
    """
    starts = range(_LOWEST, _first_ephemeral() - count, count)
    for start in random.sample(starts, k=len(starts)):
        if all(_is_free(port) for port in range(start, start + count)):
            return start
    raise RuntimeError(f"{count} ports in a row are needed, and of {_LOWEST} to {_first_ephemeral() - 1} none are free")


def _first_ephemeral() -> int:
    """Returns the first port for outgoing connections: Linux's own setting, or the customary one."""
    first = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32_768
    return max(first, _LOWEST + 1_000)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def why_busy(host: str, port: int) -> str | None:
    """Returns the reason for which nothing can listen there, or None if it can."""
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(address[0], address[1]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address[4])
    except socket.gaierror as error:
        return f"host {host} is unknown ({error.strerror}): choose another with --host"
    except (OSError, OverflowError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            return f"port {port} on {host} is in use by another program: choose another with --port"
        return f"cannot listen on {host}:{port} ({error}): choose others with --host and --port"
    return None
