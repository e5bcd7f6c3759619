"""An engine and a gateway at `::`: every port is reached by IPv4 and by IPv6."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import zmq

from mini_infer_operator.local.ports import free_ports
from mini_infer_process.listening import has_ipv6, tcp_address
from tests.engine.server.dry_server import EngineServer, environment, wait_until

pytestmark = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
LOOPBACKS = ("127.0.0.1", "::1")


def url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_greeted(address: str, kind: int) -> bool:
    """Whether a ZMQ peer finishes its handshake there."""
    context = zmq.Context()
    try:
        client = context.socket(kind)
        client.ipv6 = True
        monitor = client.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        client.connect(address)
        return bool(monitor.poll(10_000))
    finally:
        context.destroy(linger=0)


def is_ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/readyz", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def test_every_port_serves_both_families_when_the_host_is_any(tmp_path: Path) -> None:
    events, replay, transfer, gateway = free_ports(4)
    ports = (f"--events-port={events}", f"--replay-port={replay}", f"--transfer-port={transfer}")
    options = ("--host=::", "--allow-unauthenticated-peers", "--kv-transport=shm")
    with EngineServer("--dry-run", *options, *ports) as engine:
        http_port = httpx.URL(engine.url).port
        assert http_port is not None
        for host in LOOPBACKS:
            assert is_ready(url(host, http_port))
            for port, kind in ((events, zmq.SUB), (replay, zmq.DEALER), (transfer, zmq.DEALER)):
                assert is_greeted(tcp_address(host, port), kind), (host, port)
        endpoints = tmp_path / "endpoints.json"
        endpoint = {"name": "e", "url": url("::1", http_port), "model": "dry", "events": tcp_address("::1", events)}
        endpoints.write_text(json.dumps({"endpoints": [endpoint]}))
        flags = ["--host=::", f"--port={gateway}", f"--endpoints={endpoints}"]
        command = [sys.executable, "-m", "mini_infer_gateway", *flags]
        with subprocess.Popen(command, env=environment()) as process:
            try:
                for host in LOOPBACKS:
                    wait_until(lambda host=host: is_ready(url(host, gateway)))  # type: ignore[misc]  # bound at once
                    models = httpx.get(f"{url(host, gateway)}/v1/models", timeout=60).json()
                    assert [model["id"] for model in models["data"]] == ["dry"]
            finally:
                process.terminate()


def test_an_engine_listens_on_its_family_alone_when_the_host_is_one_address() -> None:
    with EngineServer("--dry-run", "--host=::1", "--events-port=0", "--replay-port=0") as engine:
        port = httpx.URL(engine.url).port
        assert port is not None
        assert is_ready(url("::1", port))
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), timeout=5)
