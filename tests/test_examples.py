"""The examples work: the client against a real server, the resources through `mini-infer plan`."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from mini_infer_operator.cli import main as mini_infer
from tests.engine.server.dry_server import DryServer, environment

ROOT = Path(__file__).parents[1]
CLIENT = ROOT / "examples" / "openai_client.py"


def run_client(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CLIENT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60)


@pytest.fixture(scope="module")
def server() -> Iterator[DryServer]:
    with DryServer("--dry-run-step-ms", "1") as server:
        yield server


@pytest.mark.parametrize("suffix", ["", "/v1"])
def test_the_client_chats_streams_and_asks_many_at_once(server: DryServer, suffix: str) -> None:
    done = run_client("--url", server.url + suffix, "--count", "5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("You said: What does textwrap.dedent do?") == 2, "chat and stream do not say the same"
    assert "5 answers" in done.stdout
    assert done.stdout.count("tokens/s") == 2
    assert "prompt tokens were cached" in done.stdout


def test_the_example_client_prints_the_error(server: DryServer) -> None:
    unknown = run_client("--url", server.url, "--model", "other")
    assert (unknown.returncode, "'other' does not exist" in unknown.stderr) == (1, True)
    unreachable = run_client("--url", "http://127.0.0.1:1")
    assert (unreachable.returncode, "make up" in unreachable.stderr) == (1, True)
    assert "Traceback" not in unknown.stderr + unreachable.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_every_resource_can_be_planned(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mini_infer(["plan", "-f", str(path)]) == 0
    manifests = list(yaml.safe_load_all(capsys.readouterr().out))
    spec = yaml.safe_load(path.read_text())["spec"]
    roles = [role for role in ("unified", "prefill", "decode") if role in spec]
    over_nodes = {role for role in roles if spec[role].get("parallelism", {}).get("nodes", 1) > 1}
    workloads = ["LeaderWorkerSet" if role in over_nodes else "Deployment" for role in roles]
    kinds = ["Service", "Service", *["PodDisruptionBudget"] * len(roles)]
    for workload in workloads:
        kinds += ["ControllerRevision", workload]
    assert [manifest["kind"] for manifest in manifests] == kinds
    replicas = [manifest["spec"]["replicas"] for manifest in manifests if manifest["kind"] in workloads]
    assert replicas == [spec[role]["replicas"] for role in roles]
