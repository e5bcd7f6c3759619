"""Every process that is killed by a signal of its own fault leaves a traceback on stderr."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.engine.server.dry_server import DryServer, environment, wait_until

_MAIN = """
import os, runpy, signal, sys, threading

def crash(*_):
    os.kill(os.getpid(), signal.SIGSEGV)

import faulthandler
enable, armed = faulthandler.enable, []
faulthandler.enable = lambda *given: (enable(*given), armed.append(True), crash())
sys.argv = {arguments!r}
from {module} import main
main()
"""
"""Ends as soon as the process has said that it shows crashes, before it does anything."""


def shows_a_crash(log: str) -> bool:
    return "Segmentation fault" in log and "File " in log


@pytest.mark.parametrize("which", [("prover_pid", "core_pid"), ("process",)], ids="-".join)
def test_a_server_prints_a_traceback_when_it_gets_sigsegv(which: tuple[str, ...]) -> None:
    with DryServer() as server:
        requested = {"prompt": "a", "max_tokens": 1, "structured_outputs": {"regex": "[a-z]"}}
        assert server.client.post("/v1/completions", json=requested).status_code == 200  # all of them have begun
        for name in which:  # a server outlives the process that checks grammars, and no other
            before = len(server.text_of_log)
            os.kill(server.process.pid if name == "process" else getattr(server, name), signal.SIGSEGV)
            wait_until(lambda before=before: shows_a_crash(server.text_of_log[before:]))  # type: ignore[misc]  # bound at once


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("mini_infer_gateway.cli", ["mini-infer-gateway"]),
        ("mini_infer_operator.controller.run", ["mini-infer-operator"]),
        ("mini_infer_operator.cli.entry", ["mini-infer", "plan"]),
        ("mini_infer_operator.local.reaper", ["reaper"]),
        ("mini_infer_engine.tools.tuning.command", ["tune"]),
        ("mini_infer_engine.tools.compare.cli", ["mini-infer-compare"]),
        ("mini_infer_engine.distributed.rank_process", ["rank", "config"]),
    ],
)
def test_a_command_prints_a_traceback_when_it_gets_sigsegv(module: str, arguments: Sequence[str]) -> None:
    program = _MAIN.format(module=module, arguments=list(arguments))
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment(), input=""
    )
    assert ended.returncode == -signal.SIGSEGV, ended.stderr[-2000:]
    assert "Segmentation fault" in ended.stderr
    assert "in main" in ended.stderr
