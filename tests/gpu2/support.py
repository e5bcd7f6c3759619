"""Programs of the tests on two GPUs, each in a process of its own: ranks of a group, and engines that answer once."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.server.dry_server import ROOT, environment

TWO_GPUS = [
    pytest.mark.gpu2,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs that are visible"),
]


HANG_S = 120.0
"""A start compiles for half a minute at most."""


def started(module: str, *arguments: str) -> subprocess.Popen[str]:
    """A program of this folder."""
    command = [sys.executable, "-m", f"tests.gpu2.{module}", *arguments]
    variables = environment() | {"PYTHONFAULTHANDLER": "1"}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def answer(process: subprocess.Popen[str], timeout_s: float = HANG_S) -> Any:
    """Its last line, which is JSON; where it fails what it has logged."""
    output, log = end_of(process, timeout_s)
    assert process.returncode == 0, log[-4000:]
    return json.loads(output.splitlines()[-1])


def end_of(process: subprocess.Popen[str], timeout_s: float) -> tuple[str, str]:
    """What it says and logs until it has ended; a failure with the stacks of all threads where it hangs."""
    try:
        return process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # A rank that sees its parent die ends without a word: it goes first.
        for number in (*_children(process.pid), process.pid):
            _signal(number, signal.SIGABRT)
            time.sleep(0.5)
        os.killpg(process.pid, signal.SIGKILL)
        log = process.communicate()[1]
        pytest.fail(f"no end within {timeout_s} s:\n{log[-12_000:]}")


def _children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Of an engine's processes the other ranks'."""
    module = b"mini_infer_engine.distributed.rank"
    return [child for child in _children(process.pid) if module in Path(f"/proc/{child}/cmdline").read_bytes()]


def _signal(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def answer_of(module: str, question: dict[str, Any], timeout_s: float = HANG_S) -> Any:
    """What one program makes of a question."""
    return answer(started(module, json.dumps(question)), timeout_s)
