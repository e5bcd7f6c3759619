"""`mini-infer up` scales its service by its gateway's reports, also to zero."""

import json
from pathlib import Path

from tests.operator.local.test_up import Up, up, wait

__all__ = ["up"]  # a fixture, used by name
NAME = "default/demo"
SCALING = {"minReplicas": 0, "maxReplicas": 2, "windows": {"downSeconds": 1, "zeroSeconds": 1}}


def report(up: Up, **load: int) -> None:
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
