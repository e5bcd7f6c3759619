"""`mini-infer up` with real engines and a real gateway: peers prove membership by a secret of this start."""

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
import zmq

from mini_infer_contract.launch import PREFILL_FROM_HEADER
from mini_infer_contract.peer_auth import PEER_HEADER, read_peer_secret
from mini_infer_operator.local.peer_key import write_peer_key
from mini_infer_operator.local.ports import free_ports
from tests.engine.server.dry_server import HANG_S, environment, wait_until
from tests.support.services import changed
from tests.support.transfer_sides import RECEIVED, new_prompt

DRY = {"replicas": 1, "engine": {"extraArgs": ["--dry-run"]}}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The gateway's URL and the folder of a service with a prefill and a decode engine."""
    folder = tmp_path_factory.mktemp("up")
    (port,) = free_ports(1)
    service = changed({"metadata": {"name": "pair"}, "spec": {"unified": None, "prefill": DRY, "decode": DRY}})
    (folder / "cr.yaml").write_text(yaml.safe_dump(service))
    program = "import sys; from mini_infer_operator import cli; sys.exit(cli.main())"
    command = [sys.executable, "-c", program, "up", "-f", "cr.yaml", "--port", str(port)]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment(), stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: process.poll() is not None or b"Ctrl-C ends everything" in (folder / "output").read_bytes())
        assert process.poll() is None, (folder / "output").read_text()
        yield f"http://127.0.0.1:{port}", folder / ".mini-infer" / "pair"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(HANG_S)


def endpoints(folder: Path) -> dict[str, dict[str, Any]]:
    content = json.loads((folder / "endpoints.json").read_text())
    return {endpoint["role"]: endpoint for endpoint in content["endpoints"]}


def test_the_gateway_receives_events_when_engines_use_peer_keys(up: tuple[str, Path]) -> None:
    url, folder = up
    assert {endpoint["peer_auth"] for endpoint in endpoints(folder).values()} == {"shared"}

    def states() -> set[tuple[str, str]]:
        rows = httpx.get(url + "/debug/endpoints", timeout=60).json()["endpoints"]
        return {(row["events"], row["state"]) for row in rows}

    wait_until(lambda: states() == {("live", "ready")})
    model = httpx.get(url + "/v1/models", timeout=60).json()["data"][0]["id"]
    body = {"model": model, "prompt": "what does it say?", "max_tokens": 3}
    assert httpx.post(url + "/v1/completions", json=body, timeout=60).status_code == 200


def test_kv_moves_between_local_engines_when_they_use_peer_keys(up: tuple[str, Path]) -> None:
    sides = endpoints(up[1])
    decode = sides["decode"]["url"]
    model = httpx.get(decode + "/v1/models", timeout=60).json()["data"][0]["id"]
    body = {"model": model, "prompt": new_prompt(), "max_tokens": 3}
    headers = {PREFILL_FROM_HEADER: sides["prefill"]["transfer"]} | token(up[1])
    assert httpx.post(decode + "/v1/completions", json=body, headers=headers, timeout=60).status_code == 200
    wait_until(lambda: f"{RECEIVED} 1.0" in httpx.get(decode + "/metrics", timeout=60).text)


def test_a_peer_receives_nothing_when_it_lacks_the_key(up: tuple[str, Path]) -> None:
    endpoint = endpoints(up[1])["prefill"]
    with zmq.Context() as context:
        socket = context.socket(zmq.SUB)
        socket.subscribe(b"")
        socket.connect(endpoint["events"])
        assert not socket.poll(1_500)  # a load report goes out every second
        socket.close(0)
    for headers in ({}, {PEER_HEADER: "1"}):
        assert httpx.post(endpoint["url"] + "/drain", headers=headers, timeout=60).status_code == 403
    assert httpx.get(endpoint["url"] + "/kv_snapshot", headers=token(up[1]), timeout=60).status_code == 200


def token(folder: Path) -> dict[str, str]:
    return {PEER_HEADER: read_peer_secret(folder / "peer.key").http_token()}


def test_each_start_writes_a_new_peer_key_readable_by_its_user_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        first = read_peer_secret(write_peer_key(tmp_path))
        path = write_peer_key(tmp_path)
    finally:
        os.umask(before)
    assert read_peer_secret(path) != first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
