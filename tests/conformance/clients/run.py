"""Real clients through the gateway: `python -m tests.conformance.clients.run [CLIENT ...]`.

The table expected.yaml has a row for each check: client, check, what is to be seen. Each check has to be in the table
and in the client's script, and to hold.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.conformance import environments
from tests.conformance.servers import Platform, running_platform

HERE = Path(__file__).parent
TABLE = HERE / "expected.yaml"
LIMIT_S = 600
_NODE_PACKAGES = {"openai-node": "openai", "ai-sdk": "ai"}
Table = dict[str, dict[str, str]]


@dataclass(frozen=True, slots=True)
class Checked:
    """One check's result."""

    client: str
    check: str
    passes: bool
    saw: str = ""


def main() -> int:
    """Run, print, and return 1 where a check fails or table and scripts differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", help="only these (default: all of the table)")
    parser.add_argument("-k", dest="check", action="append", default=[], help="only this check; may be repeated")
    arguments = parser.parse_args()
    table: Table = yaml.safe_load(TABLE.read_text())
    chosen = arguments.clients or list(table)
    results: list[Checked] = []
    with running_platform(HERE / "script.json") as platform:
        for client in chosen:
            seen = run_client(client, platform, arguments.check)
            results += seen
            print(f"{client} {versions_line(client)}: {sum(r.passes for r in seen)} of {len(seen)}", flush=True)
            print("".join(f"  {r.check}: {r.saw[:260]}\n" for r in seen if not r.passes), end="", flush=True)
    wrong = [] if arguments.check else different_rows({name: table.get(name, {}) for name in chosen}, results)
    print("\n".join(wrong))
    failed = [result for result in results if not result.passes]
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed")
    return int(bool(failed or wrong))


def run_client(client: str, platform: Platform, only: list[str]) -> list[Checked]:
    """All checks of one client, in a process of its own environment."""
    out = subprocess.run(
        [*_command(client), *only],
        env=_environment(client, platform),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        stdin=subprocess.DEVNULL,
    )
    (environments.FOLDER / "logs" / f"client-{client}.txt").write_text(out.stdout + out.stderr)
    lines = [json.loads(line) for line in out.stdout.splitlines() if line.startswith('{"check"')]
    results = [Checked(client, line["check"], line["ok"], line.get("saw", "")) for line in lines]
    return results or [Checked(client, "start", passes=False, saw=out.stderr[-600:])]


def different_rows(table: Table, results: list[Checked]) -> list[str]:
    """Checks that only the table or only the script has."""
    rows = {(client, check) for client, checks in table.items() for check in checks}
    run = {(result.client, result.check) for result in results}
    return [f"{client}: {check} is in expected.yaml and did not run" for client, check in sorted(rows - run)] + [
        f"{client}: {check} ran and is not in expected.yaml" for client, check in sorted(run - rows)
    ]


def is_node(client: str) -> bool:
    """Written in JavaScript."""
    return (HERE / f"{_stem(client)}_checks.mjs").exists()


def versions_line(client: str) -> str:
    """The client's version, for the log."""
    if is_node(client):
        package = environments.node_environment(client) / "node_modules" / _NODE_PACKAGES[client] / "package.json"
        return str(json.loads(package.read_text())["version"])
    return next(iter(environments.versions(client).values()))


def _command(client: str) -> list[str]:
    if is_node(client):
        return [str(environments.node()), str(HERE / f"{_stem(client)}_checks.mjs")]
    return [str(environments.python_environment(client)), str(HERE / f"{_stem(client)}_checks.py")]


def _environment(client: str, platform: Platform) -> dict[str, str]:
    changes = {"CONFORMANCE_URL": platform.gateway, "PYTHONPATH": str(HERE)}
    if is_node(client):
        changes["CONFORMANCE_MODULES"] = os.fspath(environments.node_environment(client) / "node_modules")
    return environments.clean_environment(**changes)


def _stem(client: str) -> str:
    return client.replace("-", "_")


if __name__ == "__main__":
    sys.exit(main())
