"""Sockets of both address families, on this machine's own loopback addresses."""

import errno
import socket
from typing import Any

import pytest

from mini_infer_process import listening
from mini_infer_process.listening import bound_socket, has_ipv6, tcp_address, usable_host

needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


def reaches(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


@needs_ipv6
@pytest.mark.parametrize(
    ("host", "by_ipv4", "by_ipv6"),
    [
        ("::", True, True),
        ("[::]", True, True),
        ("0.0.0.0", True, False),
        ("127.0.0.1", True, False),
        ("::1", False, True),
        ("[::1]", False, True),
        ("localhost", True, False),
    ],
)
def test_a_socket_serves_the_address_families_of_its_host(host: str, by_ipv4: bool, by_ipv6: bool) -> None:
    with bound_socket(host, 0) as bound:
        bound.listen()
        port = bound.getsockname()[1]
        assert (reaches("127.0.0.1", port), reaches("::1", port)) == (by_ipv4, by_ipv6)


def without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel that was booted with ipv6.disable=1."""
    real = socket.socket

    def open_socket(family: int = -1, *more: Any, **options: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family, *more, **options)

    monkeypatch.setattr(listening.socket, "socket", open_socket)


def test_both_families_mean_ipv4_when_the_kernel_has_no_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    without_ipv6(monkeypatch)
    assert usable_host("::") == "0.0.0.0"
    assert usable_host("::1") == "::1"
    with bound_socket("::", 0) as bound:
        assert bound.family == socket.AF_INET
        bound.listen()
        assert reaches("127.0.0.1", bound.getsockname()[1])
    with pytest.raises(OSError, match="Address family"):
        bound_socket("::1", 0)


@needs_ipv6
def test_both_families_are_served_when_the_system_binds_ipv6_sockets_to_ipv6_alone() -> None:
    """`::` must not depend on net.ipv6.bindv6only, nor on what is bound beside it."""
    with bound_socket("::", 0) as bound:
        assert bound.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 0
    with bound_socket("::1", 0) as bound:
        assert bound.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 1


@pytest.mark.parametrize(("host", "error"), [("no.such.invalid", socket.gaierror), ("192.0.2.1", OSError)])
def test_binding_is_refused_when_the_address_is_not_local(host: str, error: type[OSError]) -> None:
    with pytest.raises(error):
        bound_socket(host, 0)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.0.0.1", "tcp://10.0.0.1:5557"),
        ("fd00::7", "tcp://[fd00::7]:5557"),
        ("::", "tcp://[::]:5557"),
        ("leader.group.ns", "tcp://leader.group.ns:5557"),
    ],
)
def test_zmq_addresses_have_brackets_when_they_are_ipv6(host: str, address: str) -> None:
    assert tcp_address(host, 5557) == address
