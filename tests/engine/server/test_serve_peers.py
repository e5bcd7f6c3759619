"""A server's ports of peers and its admin socket, as processes on real sockets."""

import stat
import subprocess
from pathlib import Path

import httpx
import psutil
import pytest

from mini_infer_contract.launch import ROLE_PATH
from tests.engine.server.dry_server import HANG_S, DryServer, environment, free_port, serve_command


def listening(server: DryServer) -> dict[int, str]:
    """The address of each port of the server's processes."""
    found = {}
    for pid in (server.process.pid, *server.core_pids):
        for connection in psutil.Process(pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                found[connection.laddr.port] = connection.laddr.ip
    return found


@pytest.mark.parametrize(
    ("flags", "address"),
    [
        ((), "127.0.0.1"),
        (("--data-parallel-size", "2"), "127.0.0.1"),
        (("--allow-unauthenticated-peers",), "0.0.0.0"),
        (("--data-parallel-size", "2", "--peer-key-file", "KEY"), "0.0.0.0"),
    ],
)
def test_ports_of_peers_are_closed_to_the_network_when_there_is_no_key(
    flags: tuple[str, ...], address: str, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("0a" * 32)
    flags = tuple(str(tmp_path / "key") if flag == "KEY" else flag for flag in flags)
    events, replay = free_port(), free_port()
    named = ("--host", "0.0.0.0", "--events-port", str(events), "--replay-port", str(replay))
    with DryServer(*named, *flags) as server:
        addresses = listening(server)
        assert {addresses[events], addresses[replay]} == {address}
        assert ("--peer-key-file" in server.text_of_log) is ("--peer-key-file" not in flags and address == "127.0.0.1")


@pytest.mark.parametrize("content", ["", "zz" * 32])
def test_the_server_exits_naming_the_file_when_the_peer_key_is_invalid(tmp_path: Path, content: str) -> None:
    key = tmp_path / "key"
    key.write_text(content)
    command = serve_command("--dry-run", "--port", "0", "--peer-key-file", str(key))
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "--peer-key-file" in line]
    assert "64 hexadecimal digits" in line


def test_the_admin_socket_is_private_and_removed_with_the_server(tmp_path: Path) -> None:
    path, key = tmp_path / "admin", tmp_path / "key"
    key.write_text("0a" * 32)
    with DryServer("--admin-socket", str(path), "--peer-key-file", str(key)) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://engine", timeout=60) as admin:
            assert admin.get("/healthz").status_code == 200
            assert admin.get("/kv_snapshot").status_code == 200
            assert admin.post(ROLE_PATH, json={"role": "unified"}).json()["role"] == "unified"
            assert admin.post("/v1/completions", json={"model": "dry", "prompt": "x"}).status_code == 404
            assert server.client.post("/drain").status_code == 403
            assert admin.post("/drain").json()["draining"] is True
        assert server.client.get("/readyz").status_code == 503
    assert not path.exists()


def test_the_server_exits_when_the_admin_sockets_path_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "admin"
    path.write_text("a file of somebody's")
    command = serve_command("--dry-run", "--port", "0", "--admin-socket", str(path))
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 1
    assert "--admin-socket" in done.stderr
    assert path.read_text() == "a file of somebody's"
