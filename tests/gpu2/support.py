"""Programs of the tests on two GPUs, each in a process of its own: ranks of a group, and engines that answer once."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.server.dry_server import ROOT, environment

TWO_GPUS = [
    pytest.mark.gpu2,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs that are visible"),
]


def started(module: str, *arguments: str) -> subprocess.Popen[str]:
    """A program of this folder."""
    command = [sys.executable, "-m", f"tests.gpu2.{module}", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def answer(process: subprocess.Popen[str], timeout_s: float = 300) -> Any:
    """Its last line, which is JSON; what it has logged where it fails."""
    try:
        output, log = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, log = process.communicate()
        pytest.fail(f"no answer within {timeout_s} s:\n{log[-4000:]}")
    assert process.returncode == 0, log[-4000:]
    return json.loads(output.splitlines()[-1])


def asked(module: str, question: dict[str, Any], timeout_s: float = 300) -> Any:
    """What one program makes of a question."""
    return answer(started(module, json.dumps(question)), timeout_s)


def demo() -> Path:
    """The model that comes with the package."""
    return ROOT / "engine" / "mini_infer_engine" / "assets" / "demo"
