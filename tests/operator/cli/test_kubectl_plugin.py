"""kubectl runs `mini-infer` as `kubectl infer`, by the name of the script that the package installs."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.checkout import python_path
from tests.support.control_plane import find_programs

ROOT = Path(__file__).parents[3]
SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


@pytest.mark.cluster
def test_kubectl_runs_a_verb_when_the_packages_script_is_on_the_path(tmp_path: Path) -> None:
    programs = find_programs()
    if programs is None:
        pytest.skip("no kubectl: set KUBEBUILDER_ASSETS")
    module, function = SCRIPTS["kubectl-infer"].split(":")
    script = tmp_path / "kubectl-infer"
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    script.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": python_path()}
    demo = str(ROOT / "examples" / "demo.yaml")
    command = [str(programs / "kubectl"), "infer", "plan", "-f", demo]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "kind: Deployment" in done.stdout


def test_both_names_run_the_same_function_when_they_are_installed() -> None:
    assert SCRIPTS["kubectl-infer"] == SCRIPTS["mini-infer"]
