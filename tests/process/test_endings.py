"""Commands whose user ends them, or whose output nothing reads, end without a traceback."""

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.checkout import python_path

ROOT = Path(__file__).parents[2]
SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
DEMO = str(ROOT / "examples" / "demo.yaml")
ENDED_BY = """
import importlib.abc, os, signal, sys


class Ended(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in {modules}:
            os.kill(os.getpid(), signal.{signal})


sys.meta_path.insert(0, Ended())
"""
HEAVY = ("argparse", "pydantic", "aiohttp", "torch", "fastapi", "msgspec")


def run(folder: Path, command: str, *arguments: str, stdout: int, site: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a console script; `site` is code that its interpreter runs first."""
    (folder / "sitecustomize.py").write_text(site)
    module, function = SCRIPTS[command].split(":")
    program = f"import sys; from {module} import {function}; sys.argv[0] = {command!r}; sys.exit({function}())"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": python_path(folder)},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("mini-infer", ["plan", "-f", DEMO]),
        ("mini-infer", ["fetch", "demo"]),
        ("mini-infer-serve", ["--dry-run"]),
        ("mini-infer-gateway", ["--help"]),
        ("mini-infer-operator", ["--help"]),
        ("mini-infer-compare", ["--help"]),
    ],
    ids=lambda value: " ".join(value[:1]) if isinstance(value, list) else value,
)
def test_a_command_ends_without_a_traceback_when_a_signal_comes_while_modules_are_imported(
    tmp_path: Path, command: str, arguments: list[str], name: str, status: int
) -> None:
    site = ENDED_BY.format(modules=HEAVY, signal=name)
    done = run(tmp_path, command, *arguments, stdout=subprocess.PIPE, site=site)
    assert (done.returncode, done.stderr) == (status, "")


@pytest.mark.parametrize("arguments", [["plan", "-f", DEMO], ["models"]], ids=" ".join)
def test_a_command_ends_as_by_sigpipe_when_nothing_reads_its_output(tmp_path: Path, arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run(tmp_path, "mini-infer", *arguments, stdout=writer)
    finally:
        os.close(writer)
    assert done.returncode == 128 + signal.SIGPIPE
    assert "Error" not in done.stderr


def test_a_command_says_so_when_its_output_cannot_be_written(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = run(tmp_path, "mini-infer", "models", stdout=full.fileno())
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("mini-infer models: its output cannot be written")


def test_the_engines_tools_take_the_place_of_the_command_when_they_run(tmp_path: Path) -> None:
    """A signal to the command is one to the tool, also in a container, and the tool's status is the command's."""
    site = "import os, sys\nprint(os.getpid(), file=sys.stderr)\n"
    done = run(tmp_path, "mini-infer", "models", stdout=subprocess.PIPE, site=site)
    assert done.returncode == 0
    first, second = done.stderr.split()
    assert first == second
