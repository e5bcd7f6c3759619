"""Which hosts a server answers for, by where it listens and whether it asks for keys."""

import pytest

from mini_infer_web.http_server.hosts import AllowedHosts, allowed_hosts


def code(hosts: AllowedHosts, *headers: tuple[bytes, bytes], method: bytes = b"GET", websocket: bool = False) -> str:
    refusal = hosts.refusal(method, headers, opens_websocket=websocket)
    return (refusal.code or "") if refusal else ""


def host(name: str) -> tuple[bytes, bytes]:
    return b"host", name.encode()


LOCAL = ["localhost", "LOCALHOST:8080", "a.localhost", "127.0.0.1:8080", "[::1]:80", "[::1]", "10.0.0.1", "machine", ""]
DOMAINS = ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "x.localhost.example"]


@pytest.mark.parametrize("listening", ["127.0.0.1", "localhost", "::1"])
@pytest.mark.parametrize("name", LOCAL)
def test_names_that_no_page_has_are_allowed_when_a_keyless_server_listens_on_loopback(
    listening: str, name: str
) -> None:
    assert code(allowed_hosts((), listening, has_keys=False), host(name)) == ""


@pytest.mark.parametrize("name", DOMAINS)
def test_domains_are_refused_when_a_keyless_server_listens_on_loopback(name: str) -> None:
    assert code(allowed_hosts((), "127.0.0.1", has_keys=False), host(name)) == "host_not_allowed"


@pytest.mark.parametrize(("listening", "has_keys"), [("0.0.0.0", False), ("::", False), ("127.0.0.1", True)])
def test_every_host_is_allowed_when_others_reach_the_server_or_need_a_key(listening: str, has_keys: bool) -> None:
    assert code(allowed_hosts((), listening, has_keys=has_keys), host("10.1.2.3:8000")) == ""


@pytest.mark.parametrize(
    ("configured", "name", "expected"),
    [
        (("api.example",), "api.example:443", ""),
        (("api.example",), "localhost", "host_not_allowed"),
        (("*.example",), "a.b.example", ""),
        (("*.example",), "example", "host_not_allowed"),
        (("*",), "anything", ""),
        (("[::1]",), "[::1]:80", ""),
    ],
)
def test_the_named_hosts_count_when_there_are_any(configured: tuple[str, ...], name: str, expected: str) -> None:
    assert code(allowed_hosts(configured, "127.0.0.1", has_keys=False), host(name)) == expected


@pytest.mark.parametrize(
    ("origin", "method", "websocket", "expected"),
    [
        (b"https://evil.example", b"POST", False, "origin_not_allowed"),
        (b"null", b"DELETE", False, "origin_not_allowed"),
        (b"https://evil.example", b"GET", True, "origin_not_allowed"),
        (b"https://evil.example", b"GET", False, ""),
        (b"http://localhost:8080", b"POST", False, ""),
        (b"https://chat.example", b"POST", False, ""),
    ],
)
def test_pages_from_elsewhere_change_nothing_when_names_are_checked(
    origin: bytes, method: bytes, websocket: bool, expected: str
) -> None:
    hosts = allowed_hosts((), "127.0.0.1", has_keys=False, origins=("https://chat.example",))
    sent = host("localhost:8080"), (b"origin", origin)
    assert code(hosts, *sent, method=method, websocket=websocket) == expected
