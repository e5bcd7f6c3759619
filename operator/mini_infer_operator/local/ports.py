"""Free ports on this machine."""

import errno
import socket
from contextlib import ExitStack

HOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; all are held together, so they differ."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]


def why_busy(host: str, port: int) -> str | None:
    """Why nothing can listen there, or None if it can."""
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
