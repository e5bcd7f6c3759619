"""docs/security.md names tests that exist, every port and every ZMQ socket."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from mini_infer_contract import launch
from mini_infer_process.zmq_limits import TABLE, SocketLimits

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))
PORTS = {name: value for name, value in vars(launch).items() if name.endswith("_PORT")}


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize(("file", "name"), NAMED, ids=lambda part: part)
def test_a_claims_test_exists_when_the_page_names_it(file: str, name: str) -> None:
    assert (ROOT / file).is_file()
    assert name in functions_of(file)


def test_every_claim_names_a_test() -> None:
    claims = PAGE.partition("## Actors and claims")[2].partition("\n## ")[0]
    items = re.split(r"^- ", claims, flags=re.MULTILINE)[1:]
    assert len(items) > 30
    assert [item for item in items if "`tests/" not in item] == []


@pytest.mark.parametrize("name", PORTS)
def test_every_port_is_on_the_page(name: str) -> None:
    assert re.search(rf"^\|[^|]*\({PORTS[name]}\)", PAGE, re.MULTILINE), f"{name} has no row in docs/security.md"


@pytest.mark.parametrize("limits", TABLE, ids=lambda limits: limits.socket)
def test_every_zmq_socket_says_its_proof(limits: SocketLimits) -> None:
    assert f"\n| {limits.socket} | " in PAGE


def test_a_findings_test_exists_when_the_list_names_it() -> None:
    page = (ROOT / "benchmarks" / "results" / "2026-11-28-hard-shell.md").read_text()
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page))
    assert len(named) > 100
    assert {(file, name) for file, name in named if name not in functions_of(file)} == set()
