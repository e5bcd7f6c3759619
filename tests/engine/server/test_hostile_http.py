"""The engine's own port under hostile connections: probes are answered, limits are the gateway's."""

import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.engine.server.dry_server import DryServer

UPGRADE = b"POST /x HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[DryServer]:
    with DryServer("--dry-run-step-ms", "1", "--client-max-connections", "64") as started:
        yield started


def connect(server: DryServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def test_a_probe_is_answered_when_half_open_connections_take_all_places(server: DryServer) -> None:
    connections = [connect(server) for _ in range(200)]
    for number, one in enumerate(connections):
        if number % 2:
            one.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx: ")
    for _ in range(5):
        assert httpx.get(server.url + "/healthz", timeout=3).status_code == 200
    for one in connections:
        one.close()


def test_a_failed_upgrade_is_answered_closed_and_logged_once(server: DryServer) -> None:
    for _ in range(100):
        with connect(server) as raw:
            raw.sendall(UPGRADE)
            response = raw.makefile("rb").read()  # to its end: the server closes
            assert response.startswith(b"HTTP/1.1 400")
    assert httpx.get(server.url + "/healthz", timeout=3).status_code == 200
    assert server.text_of_log.count("invalid_upgrade of 127.0.0.1") == 1


def test_a_request_gets_431_when_a_header_has_a_megabyte(server: DryServer) -> None:
    response = httpx.get(server.url + "/healthz", headers={"x-long": "y" * (1 << 20)}, timeout=60)
    assert response.status_code == 431


def test_a_request_gets_421_when_its_host_is_not_allowed(server: DryServer) -> None:
    response = httpx.get(server.url + "/v1/models", headers={"host": "evil.example"}, timeout=60)
    assert (response.status_code, response.json()["error"]["code"]) == (421, "host_not_allowed")


def test_a_stream_is_not_chunked_when_the_client_speaks_http_1_0(server: DryServer) -> None:
    body = b'{"model":"dry","prompt":"hello","max_tokens":5,"stream":true}'
    with connect(server) as raw:
        head = b"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        raw.sendall(head % len(body) + body)
        response_head, _, response = raw.makefile("rb").read().partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in response_head.lower()
    assert response.startswith(b"data: ")
    assert response.rstrip().endswith(b"[DONE]")
