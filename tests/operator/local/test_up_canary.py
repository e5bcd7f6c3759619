"""`mini-infer up` judges an edit by its gateway's figures, and goes back by itself or goes on."""

import json
import subprocess
from itertools import count
from pathlib import Path
from typing import Any

from tests.operator.local.test_up import Up, up, wait

__all__ = ["up"]  # a fixture, used by name
NAME = "default/demo"
STEPS = [{"mirror": "50%", "pauseSeconds": 0}, {"weight": "50%", "pauseSeconds": 0}]
CANARY = {"steps": STEPS, "analysis": {"minRequests": 5, "answers": {"samples": 1}}}
ROLLOUT = {"minReadySeconds": 0, "canary": CANARY}


def canary(up: Up) -> dict[str, Any]:
    return dict(up.endpoints_file()["services"][0].get("status", {}).get("canary") or {})


def until_phase(up: Up, expected: str, **more: float) -> None:
    """Lets the gateway count so much more of the new revision in each look, until the canary is in this phase."""
    state, path, numbers = canary(up), Path(up.folder) / ".mini-infer" / "demo" / "rollouts.json", count(1)

    def is_there() -> bool:
        number = next(numbers)
        figures = {kind: number * amount for kind, amount in more.items()}
        revisions = {state["revision"]: figures, state["stableRevision"]: {}}
        path.with_suffix(".new").write_text(json.dumps({"started_s": 1.0, "services": {NAME: revisions}}))
        path.with_suffix(".new").replace(path)
        return bool(canary(up)["phase"] == expected)

    wait(is_there, why=up.output)


def edited(up: Up, tokens: int) -> str:
    """Makes an edit, and waits for its engine. Returns its revision."""
    up.write(ROLLOUT, replicas=1, engine={"maxModelLen": tokens})
    before = canary(up).get("revision")
    wait(lambda: canary(up).get("revision") not in (None, before), why=up.output)
    revision = str(canary(up)["revision"])
    wait(lambda: revision in {one["revision"] for one in up.endpoints()}, why=up.output)
    return revision


def test_up_judges_edits_by_figures_and_verbs(up: Up) -> None:
    up.write(ROLLOUT, replicas=1, engine={"maxModelLen": 1024})
    up.start()
    up.until_prints("1 of 1 engines are ready")
    (old,) = {one["revision"] for one in up.endpoints()}

    bad = edited(up, 2048)
    until_phase(up, "RolledBack", requests=1, errors=1)
    up.until_prints("CanaryRolledBack: ")
    wait(lambda: {one["revision"] for one in up.endpoints()} == {old}, why=up.output)
    assert (canary(up)["revision"], canary(up)["reason"]) == (bad, "Errors")

    good = edited(up, 3072)
    until_phase(up, "Promoted", requests=20, replays=2)
    wait(lambda: {one["revision"] for one in up.endpoints()} == {good}, why=up.output)

    stopped = edited(up, 4096)
    done = subprocess.run(
        up.command("rollout", "abort", "demo"), cwd=up.folder, env=up.environment, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    wait(lambda: canary(up)["phase"] == "RolledBack", why=up.output)
    assert (canary(up)["revision"], canary(up)["reason"]) == (stopped, "Aborted")
    wait(lambda: {one["revision"] for one in up.endpoints()} == {good}, why=up.output)
    assert up.stop() == 0
