"""`mini-infer up` scales its service by its gateway's reports, also to zero."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from tests.operator.local.test_up import Up, up, wait
from tests.support.services import changed

__all__ = ["up"]  # a fixture, used by name
NAME = "default/demo"
SCALING = {"minReplicas": 0, "maxReplicas": 2, "windows": {"downSeconds": 1, "zeroSeconds": 1}}


def report(up: Up, **load: Any) -> None:
    """Lets the gateway report this load."""
    path = Path(up.folder) / ".mini-infer" / "demo" / "load.json"
    path.with_suffix(".new").write_text(json.dumps({"started_s": 1.0, "services": {NAME: load}}))
    path.with_suffix(".new").replace(path)


def test_up_stops_its_last_engine_and_starts_one_when_a_request_waits(up: Up) -> None:
    up.write(replicas=1, scaling=SCALING)
    up.start()
    up.until_prints("1 of 1 engines are ready")
    (service,) = up.endpoints_file()["services"]
    assert (service["name"], service["model"], service["starts_on_demand"]) == (NAME, "demo", True)
    up.until_prints("unified goes from 1 to 0: ")
    wait(lambda: up.endpoints() == [], why=up.output)
    report(up, queued_requests=3)
    up.until_prints("unified goes from 0 to 1: ")
    wait(lambda: len(up.endpoints()) == 1, why=up.output)
    report(up, queued_requests=3, queued_tokens=90_000_000)
    up.until_prints("unified goes from 1 to 2: ")
    wait(lambda: len(up.endpoints()) == 2, why=up.output)
    wait(lambda: up.endpoints_file()["services"][0]["status"]["roles"][0].get("wanted") == 2, why=up.output)
    assert up.stop() == 0


def test_up_switches_an_engine_when_the_other_role_needs_it(up: Up) -> None:
    role = {"replicas": 2, "scaling": {"minReplicas": 1, "maxReplicas": 3, "windows": {"downSeconds": 600}}}
    prefill = {**role, "replicas": 1}
    service = changed({"spec": {"unified": None, "prefill": prefill, "decode": role}})
    (up.folder / "cr.yaml").write_text(yaml.safe_dump(service))
    up.start()
    up.until_prints("prefill 1 of 1 and decode 2 of 2 engines are ready")
    before = {endpoint["name"]: endpoint["url"] for endpoint in up.endpoints()}
    busy = {name: {"role": "decode", "running": 5} for name in before if name.endswith("-0")}
    report(up, running_requests=1, queued_tokens=230_000, engines=busy)
    up.until_prints(" serves as prefill from now on")
    wait(lambda: sorted(e["role"] for e in up.endpoints()).count("prefill") == 2, why=up.output)
    after = {endpoint["name"]: endpoint for endpoint in up.endpoints()}
    assert {name: after[name]["url"] for name in before} == before, "the same processes"
    (switched,) = (name for name in before if "-decode-" in name and after[name]["role"] == "prefill")
    assert switched.endswith("-1"), "the idle one"
    assert "switched to prefill by 64 digits" in get(after[switched]["url"] + "/readyz")["flags"]
    assert up.stop() == 0


def get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=60) as response:
        return dict(json.load(response))
