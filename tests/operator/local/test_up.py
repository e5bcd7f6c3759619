"""`mini-infer up` as a process: starts, restarts, follows edits, and leaves nothing behind however it ends."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mini_infer_operator.local.ports import free_ports
from tests.support.services import changed

ROOT = Path(__file__).parents[3]
# The stand-ins start in a tenth of a second; everything else is the real thing.
RUN = """
import sys
from mini_infer_operator.resource import InferenceService
from mini_infer_operator.resource.not_yet import NOT_YET
from mini_infer_operator import cli
from mini_infer_operator.local import commands
commands.ENGINE, commands.GATEWAY = "tests.support.small_engine", "tests.support.small_gateway"
InferenceService.rules = tuple(rule for rule in InferenceService.rules if rule not in NOT_YET)
sys.exit(cli.main())
"""


class Up:
    """One run of `mini-infer up` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.mark = f"up-test-{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.write()

    def write(self, rollout: dict[str, Any] | None = None, **unified: Any) -> None:
        service = changed({"spec": {"unified": unified} | ({"rollout": rollout} if rollout else {})})
        (self.folder / "cr.new").write_text(yaml.safe_dump(service))
        (self.folder / "cr.new").replace(self.folder / "cr.yaml")

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-c", RUN, *arguments]

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(ROOT), *sys.path])
        return {**os.environ, "PYTHONPATH": path, "MARK": self.mark} | {"OMP_NUM_THREADS": "1"}

    def start(self, *arguments: str) -> None:
        with (self.folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                self.command("up", "-f", "cr.yaml", f"--port={self.port}", *arguments),
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def until_prints(self, text: str, limit_s: float = 120.0) -> None:
        wait(lambda: text in self.output(), limit_s, self.output)

    def endpoints_file(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / ".mini-infer" / "demo" / "endpoints.json").read_text())
        return content

    def endpoints(self) -> list[dict[str, Any]]:
        return list(self.endpoints_file()["endpoints"])

    def processes(self) -> list[int]:
        """Everything that was started with our environment, however many parents ago."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if f"MARK={self.mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
            except OSError:
                continue
        return found

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)


def wait(what: Callable[[], Any], limit_s: float = 120.0, why: Callable[[], str] = str) -> Any:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if answer := what():
            return answer
        time.sleep(0.05)
    raise AssertionError(why() or f"not within {limit_s} s")


def post(url: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return bytes(response.read())


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    run = Up(tmp_path)
    yield run
    if run.process is not None:
        run.process.kill()
        run.process.wait()
        wait(lambda: not run.processes())


def test_up_serves_prints_its_url_first_and_ends_when_interrupted(up: Up) -> None:
    up.start()
    up.until_prints("Ctrl-C ends everything")
    text = up.output()
    assert "demo: 2 of 2 engines are ready" in text
    assert f"curl {up.url}/v1/chat/completions" in text
    assert 0 < text.index(f"Open {up.url}/ in a browser") < text.index("curl "), "the console's address comes first"
    endpoints = up.endpoints()
    assert {(e["model"], e["service"], e.get("role", "unified")) for e in endpoints} == {
        ("demo", "default/demo", "unified")
    }
    assert len({e[kind] for e in endpoints for kind in ("url", "events", "replay")}) == 6
    assert not any(e.get("transfer") for e in endpoints)
    requested = subprocess.run(
        up.command("chat", "--url", up.url),
        input="hello\nagain\n/reset\nnew\n",
        env=up.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert requested.stdout.splitlines() == [
        "1 messages, the last: hello ",
        "3 messages, the last: again ",
        "1 messages, the last: new ",
    ]
    assert up.stop() == 0
    assert up.output().rstrip().endswith("everything has ended")
    assert up.processes() == []


def test_up_runs_roles_with_their_flags_and_transfer_ports(up: Up) -> None:
    roles = {"prefill": {"replicas": 1}, "decode": {"replicas": 2, "parallelism": {"tensor": 2, "nodes": 2}}}
    service = changed({"spec": {"unified": None, **roles}})
    (up.folder / "cr.yaml").write_text(yaml.safe_dump(service))
    up.start()
    up.until_prints("prefill 1 of 1 and decode 2 of 2 engines are ready")
    up.until_prints("decode engines span nodes in a cluster: here all ranks of one run on this machine")
    endpoints = up.endpoints()
    assert sorted(e["role"] for e in endpoints) == ["decode", "decode", "prefill"]
    assert len({e["transfer"] for e in endpoints} | {e["url"] for e in endpoints}) == 6
    assert len({e["revision"] for e in endpoints}) == 1
    assert {e["role"]: bool(e.get("group")) for e in endpoints} == {"prefill": False, "decode": True}
    (decode, *_) = (e for e in endpoints if e["role"] == "decode")
    with urllib.request.urlopen(f"{decode['url']}/healthz", timeout=60) as answer:
        flags = json.loads(answer.read())["flags"]
    port = decode["transfer"].rpartition(":")[2]
    assert {"--role=decode", f"--transfer-port={port}", "--tensor-parallel-size=2"} <= set(flags)
    assert not any(flag.startswith("--nnodes") for flag in flags)
    table = run(up, "status", "--local").stdout
    assert "prefill 1/1, decode 2/2" in table
    assert up.stop() == 0
    assert up.processes() == []


def test_up_lists_transfer_addresses_when_unified_engines_use_kv_transfer(up: Up) -> None:
    up.write(engine={"kvTransport": "shm"})
    up.start()
    up.until_prints("2 of 2 engines are ready")
    endpoints = up.endpoints()
    assert len({e[kind] for e in endpoints for kind in ("url", "transfer")}) == 4
    for endpoint in endpoints:
        with urllib.request.urlopen(f"{endpoint['url']}/healthz", timeout=60) as answer:
            flags = json.loads(answer.read())["flags"]
        port = endpoint["transfer"].rpartition(":")[2]
        assert {"--role=unified", f"--transfer-port={port}", "--kv-transport=shm"} <= set(flags)
    assert up.stop() == 0
    assert up.processes() == []


def test_up_restarts_an_engine_and_removes_its_endpoint_when_it_dies(up: Up) -> None:
    up.start()
    up.until_prints("2 of 2 engines are ready")
    first = up.endpoints()[0]
    with pytest.raises(OSError):  # noqa: PT011 - it dies before it answers; how that shows is the system's affair
        post(f"{first['url']}/crash", {})
    up.until_prints("ended with exit code 9: serving on")
    wait(lambda: first["url"] not in {e["url"] for e in up.endpoints()})
    wait(lambda: len(up.endpoints()) == 2, why=up.output)
    assert up.stop(signal.SIGTERM) == 0
    assert up.processes() == []


def test_up_rolls_out_an_edit_and_changes_nothing_when_it_is_invalid(up: Up) -> None:
    up.start()
    up.until_prints("2 of 2 engines are ready")
    before = up.endpoints()
    up.write(replicas=-2)
    up.until_prints("spec.unified.replicas: ")
    assert up.endpoints() == before
    up.write(replicas=1)
    wait(lambda: [e for e in up.endpoints() if not e.get("draining")] in ([before[0]], [before[1]]), why=up.output)
    up.write(replicas=1, engine={"maxNumSeqs": 8})
    seen: list[int] = []

    def rolled() -> bool:
        urls = {e["url"] for e in up.endpoints() if not e.get("draining")}
        seen.append(len(urls))
        return not urls & {e["url"] for e in before}

    wait(rolled, why=up.output)
    assert min(seen) >= 1
    assert up.stop() == 0


def test_nothing_is_left_when_it_is_killed(up: Up) -> None:
    up.start()
    up.until_prints("2 of 2 engines are ready")
    assert len(up.processes()) > 5
    up.stop(signal.SIGKILL)
    wait(lambda: not up.processes())


def test_up_prints_the_reason_when_an_engine_cannot_start(up: Up) -> None:
    up.write(replicas=1, engine={"maxNumSeqs": 13})
    up.start("--verbose")
    up.until_prints("ended with exit code 3: ERROR 13 brings bad luck")
    up.until_prints("-0] ERROR 13 brings bad luck")
    wait(lambda: "ended with exit code 3: ERROR 13" in str(up.endpoints_file()["pending"]), why=up.output)
    up.write(replicas=1)
    up.until_prints("1 of 1 engines are ready")
    wait(lambda: up.endpoints_file()["pending"] == [], why=up.output)

    def reported() -> tuple[str, str]:
        (service,) = up.endpoints_file()["services"]
        reasons = {one["type"]: one["reason"] for one in service["status"]["conditions"]}
        return service["name"], reasons["Ready"]

    wait(lambda: reported() == ("default/demo", "AllReplicasReady"), why=up.output)
    wait(lambda: up.endpoints_file()["services"][0]["status"].get("modelImpl") == "native", why=up.output)
    assert up.stop() == 0


def run(up: Up, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        up.command(*arguments),
        cwd=up.folder,
        env=up.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_up_names_the_port_when_it_is_in_use(up: Up) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer

    with HTTPServer(("127.0.0.1", up.port), BaseHTTPRequestHandler):
        result = run(up, "up", "-f", "cr.yaml", f"--port={up.port}")
    assert result.returncode == 2
    assert result.stderr == (
        f"mini-infer up: port {up.port} on 127.0.0.1 is in use by another program: choose another with --port\n"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spec": {"model": {"uri": "pvc://claim"}}}, "spec.model.uri: pvc://claim is a volume of a cluster"),
        (
            {"spec": {"model": {"uri": "pvc://a/b", "cache": {"claim": "c"}}}},
            "spec.model.cache: pvc://a/b is copied by",
        ),
        ({"spec": {"model": {"uri": "oci://a/b:1"}}}, "spec.model.uri: oci://a/b:1 is an image"),
        ({"spec": {"model": {"uri": "file:///not/here"}}}, "spec.model.uri: there is no folder /not/here"),
        ({"spec": {"unified": None}}, "spec: no role is given"),
        ({"kind": "Other"}, "cr.yaml holds no InferenceService (Other)"),
    ],
)
def test_up_refuses_a_service_when_it_cannot_run_locally(up: Up, change: dict[str, Any], message: str) -> None:
    (up.folder / "cr.yaml").write_text(yaml.safe_dump(changed(change)))
    result = run(up, "up", "-f", "cr.yaml")
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
