"""SIGTERM ends an engine from its first moment, also where it is the first process of its container."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import importlib.abc, os, signal, sys


class Terminated(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGTERM)  # what the kubelet sends to a pod that is over while it starts


sys.meta_path.insert(0, Terminated())
from mini_infer_engine.server.entry import main
main()
"""


@pytest.mark.parametrize("module", ["mini_infer_engine.server.cli", "mini_infer_contract.engine_options"])
def test_the_process_ends_when_a_signal_arrives_during_import(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, module], capture_output=True, timeout=60, check=False)
    # An exit of its own: -15 would be the default action, which the first process of a container does not have.
    assert done.returncode == 143, done.stderr


def test_the_process_ends_when_a_signal_arrives_before_python_starts() -> None:
    """As the images start it: the first process of a container has no default action to end it."""
    images = (ROOT / "Dockerfile").read_text()
    assert images.count('ENTRYPOINT ["env", "--block-signal=TERM", "mini-infer-serve"]') == 2
    program = "print(flush=True); input(); from mini_infer_engine.server.entry import main; main()"
    command = ["env", "--block-signal=TERM", sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(timeout=60) == 143


def test_the_console_script_starts_the_entry_module() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["mini-infer-serve"] == "mini_infer_engine.server.entry:main"
