"""Commands of a wheel that was installed without extras: one sentence that names package and extra, no traceback."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.checkout import PARTS, python_path

ROOT = Path(__file__).parents[2]
BLOCKED = """
import importlib.abc, sys

PACKAGES = set("fastapi gguf httptools huggingface_hub llguidance numpy prometheus_client zmq safetensors torch tqdm "
               "uvicorn uvloop websockets zstandard aiohttp starlette".split())


class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in PACKAGES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing())
"""
SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def run(folder: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command as its console script runs it, where only the packages without an extra can be imported."""
    (folder / "sitecustomize.py").write_text(BLOCKED)
    module, function = SCRIPTS[command].split(":")
    program = f"import sys; from {module} import {function}; sys.argv[0] = {command!r}; sys.exit({function}())"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": python_path(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("command", "arguments", "extra"),
    [
        ("mini-infer-serve", ["--dry-run"], "engine"),
        ("mini-infer-gateway", ["--help"], "gateway"),
        ("mini-infer-operator", ["--help"], "operator"),
        ("mini-infer-operator", ["--apply-crd"], "operator"),
        ("mini-infer-compare", ["--help"], "engine"),
        ("mini-infer", ["up", "-f", "x.yaml"], "all"),
        ("mini-infer", ["status"], "operator"),
        ("mini-infer", ["why", "x"], "operator"),
        ("mini-infer", ["rollout", "status", "x"], "operator"),
        ("mini-infer", ["tune", "--help"], "engine"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_the_extra_is_named_when_its_packages_are_missing(
    tmp_path: Path, command: str, arguments: list[str], extra: str
) -> None:
    done = run(tmp_path, command, *arguments)
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(command)
    assert "is not installed" in line
    assert f"pip install '.[{extra}]'" in line
    assert f".whl[{extra}]'" in line


DEMO = str(ROOT / "examples" / "demo.yaml")


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "-f", DEMO], ["chat", "-h"], ["models", "--json"]])
def test_commands_that_need_no_extra_work_when_there_is_none(tmp_path: Path, arguments: list[str]) -> None:
    done = run(tmp_path, "mini-infer", *arguments)
    assert done.returncode == 0, done.stderr


def test_nothing_names_another_projects_distribution() -> None:
    """On PyPI mini-infer is somebody else's program."""
    files = [
        path
        for part in (*PARTS, "docs", "scripts")
        for path in (ROOT / part).rglob("*")
        if path.suffix in {".py", ".md", ".sh"}
    ]
    wrong = ("pip install mini-infer", "pip install 'mini-infer", 'pip install "mini-infer')
    named = [str(path) for path in [*files, ROOT / "README.md"] if any(text in path.read_text() for text in wrong)]
    assert named == []
