"""Every benchmark of the engine runs, on a CPU with the demo model and tiny loads, and writes what it says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.server.dry_server import ROOT, environment

SCRIPTS = {  # script: what its JSON must hold beside where it was measured
    "ablations.py": "medians",
    "attention.py": "cases",
    "engine_offline.py": "medians",
    "engine_serving.py": "demo",
    "interference.py": "chunks",
    "memory.py": "models",
    "startup.py": "demo",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_smoke(script: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", "--smoke", "--out", str(out)],
        cwd=ROOT,
        env=environment() | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    written = json.loads(out.read_text())
    assert written[SCRIPTS[script]], written
    assert written["date"]
    assert len(done.stdout.splitlines()) >= 2, "no table"
