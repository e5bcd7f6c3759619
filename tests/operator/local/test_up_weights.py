"""`mini-infer up` with real engines: a second one loads its weights from the first."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import yaml

from mini_infer_operator.local.ports import free_port_range, free_ports
from tests.engine.server.dry_server import HANG_S, environment, wait_until
from tests.support.services import changed


def test_a_second_engine_loads_the_weights_of_the_first_when_a_service_grows(tmp_path: Path) -> None:
    (port,) = free_ports(1)

    def write(replicas: int) -> None:
        unified = {"replicas": replicas, "engine": {"device": "cpu", "weightsFrom": "peers", "quantization": "int8"}}
        (tmp_path / "cr.new").write_text(yaml.safe_dump(changed({"spec": {"unified": unified}})))
        (tmp_path / "cr.new").replace(tmp_path / "cr.yaml")

    def endpoints() -> list[dict[str, Any]]:
        content = json.loads((tmp_path / ".mini-infer" / "demo" / "endpoints.json").read_text())
        return list(content["endpoints"])

    write(1)
    program = "import sys; from mini_infer_operator import cli; sys.exit(cli.main())"
    command = [sys.executable, "-c", program, "up", "-f", "cr.yaml", "--port", str(port)]
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until(
            lambda: process.poll() is not None or b"Ctrl-C ends everything" in (tmp_path / "output").read_bytes()
        )
        (first,) = endpoints()
        write(2)
        wait_until(lambda: len(endpoints()) == 2)
        (second,) = [endpoint for endpoint in endpoints() if endpoint["name"] != first["name"]]
        loaded = httpx.get(second["url"] + "/readyz", timeout=60).json()["weights"]
        assert loaded["source"] == "peer"
        metrics = httpx.get(second["url"] + "/metrics", timeout=60).text
        assert 'mini_infer_engine_weights_loaded_bytes{source="peer"}' in metrics
        assert 'mini_infer_engine_start_seconds{stage="weights"}' in metrics
        assert httpx.get(first["url"] + "/readyz", timeout=60).json()["weights"]["source"] == "files"
        sent = re.compile(r"mini_infer_engine_weights_sent_bytes_total ([0-9.e+]+)")

        def sent_bytes() -> float:
            found = sent.search(httpx.get(first["url"] + "/metrics", timeout=60).text)
            return 0.0 if found is None else float(found[1])

        wait_until(lambda: sent_bytes() == loaded["num_bytes"])
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(HANG_S)


def test_ports_are_in_a_row_when_an_engine_has_several_ranks() -> None:
    first = free_port_range(8)
    assert 15_000 <= first < 65_528
