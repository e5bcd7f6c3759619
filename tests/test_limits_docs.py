"""docs/limits.md is the code's, and no limit that is declared where limits are is missing there."""

import ast
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from mini_infer_contract.engine_options import EngineOptions
from mini_infer_contract.options import option_rows
from mini_infer_engine.config.options.server_options import ServerOptions
from mini_infer_process.zmq_limits import TABLE
from mini_infer_web.http_server.limits import ConnectionLimits
from scripts.limits_docs import covered, page
from tests.engine.server.dry_server import environment

ROOT = Path(__file__).parents[1]
WHOLE_MODULES = (
    "mini_infer_web.http_server.limits",
    "mini_infer_engine.structured.limits",
    "mini_infer_gateway.prompts.tokenizer_form",
)
"""Every public number of these is a limit."""


def test_the_page_of_limits_is_current() -> None:
    assert (ROOT / "docs" / "limits.md").read_text() == page(), "run make crds"


@pytest.mark.parametrize("module", WHOLE_MODULES)
def test_no_constant_is_missing_when_a_module_declares_limits(module: str) -> None:
    package = module.partition("_")[2].partition(".")[0].removeprefix("infer_")
    tree = ast.parse((ROOT / package / f"{module.replace('.', '/')}.py").read_text())
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    names = {target.id for target in targets if isinstance(target, ast.Name) and re.match("[A-Z]", target.id)}
    assert names
    assert {f"{module}:{name}" for name in names} - covered() == set()


def test_no_flag_that_begins_with_max_is_missing_when_an_engine_has_it() -> None:
    rows = [row for struct in (EngineOptions, ServerOptions) for row in option_rows(struct)]
    flags = {f"engine {row.flag}" for row in rows if "max-" in row.flag or row.flag.endswith("-timeout")}
    assert flags - covered() == set()


def test_flags_are_the_gateways_when_the_page_names_them() -> None:
    call = "from mini_infer_gateway.cli import parse; parse(['--help'])"
    shown = subprocess.run(
        [sys.executable, "-c", call], capture_output=True, text=True, env=environment(), check=True
    ).stdout
    known = set(re.findall(r"^  (--[a-z][a-z-]*)", shown, re.MULTILINE))
    named = {name.removeprefix("gateway ") for name in covered() if name.startswith("gateway ")}
    assert named - known == set()
    assert {flag for flag in known if "max-" in flag} - named == {"--max-local-prefill-tokens"}


def test_every_limit_of_connections_and_sockets_is_on_the_page() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| ")]
    assert all(any(line.startswith(f"| {row.socket} |") for line in rows) for row in TABLE)
    flags = {
        f"gateway --client-{field.name.removesuffix('_s').replace('_', '-')}" for field in fields(ConnectionLimits)
    }
    assert flags <= covered()
