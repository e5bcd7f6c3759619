"""The documents say what is so: links lead somewhere, targets and flags exist, snippets run, tables are the code's."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mini_infer_engine.api.dialects.neutral import is_one_of
from mini_infer_engine.api.dialects.openai.chat import ChatRequest
from mini_infer_engine.api.dialects.openai.completions import CompletionRequest
from mini_infer_engine.config.options.mechanisms import Mechanism
from tests.engine.server.dry_server import DryServer, environment

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
DOCUMENTS += (ROOT / "charts").rglob("*.md")
MODULES = {
    "mini-infer": "mini_infer_operator.cli",
    "mini-infer-serve": "mini_infer_engine.server.cli",
    "mini-infer-gateway": "mini_infer_gateway.cli",
    "mini-infer-operator": "mini_infer_operator.settings",
    "mini-infer-compare": "mini_infer_engine.tools.compare.cli",
}
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
COMMAND = re.compile(
    r"(mini-infer(?:-serve|-gateway|-operator|-compare)?)"
    r"((?: +(?:up|plan|chat|size|fetch|models|tune)\b)?)((?: +[^\s`|#]+)+)"
)


def anchors(path: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_tour_says_how_long_its_files_are():
    """A tenth may be added or taken away before a reader would feel misled."""
    tour = ROOT / "docs" / "tour.md"
    stated = re.findall(r"\[[^\]]+\]\(([^)]+\.py)\)(?:\*\*)?\s+\((\d[\d,]*)", tour.read_text())
    assert len(stated) > 20
    for path, number in stated:
        lines = len((tour.parent / path).read_text().splitlines())
        assert abs(int(number.replace(",", "")) - lines) <= max(10, lines // 10), (path, lines)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_document_links_resolve(path: Path) -> None:
    targets = [target for target in LINK.findall(path.read_text()) if "://" not in target]
    broken = []
    for target in targets:
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def test_documented_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = {name for text in code_of_all() for name in re.findall(r"\bmake ([a-z0-9-]+)", text)}
    assert used
    assert used - targets == set()


def test_documented_flags_exist() -> None:
    used: dict[tuple[str, str], set[str]] = {}
    for text in code_of_all():
        for command, part, rest in COMMAND.findall(text):
            written = re.findall(r"(?<!\S)--?[a-z][a-z-]*", rest)
            used.setdefault((command, part.strip()), set()).update(written)
    assert len(used) >= 5
    for (command, part), flags in used.items():
        if command == "mini-infer" and not part:
            continue
        call = f"from {MODULES[command]} import {'parse_settings' if 'operator' in command else 'main'} as run; run"
        arguments = [*([part] if part else []), "--help"]
        shown = subprocess.run(
            [sys.executable, "-c", f"{call}({arguments!r})"], capture_output=True, text=True, env=environment()
        ).stdout
        known = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", shown))
        assert flags - known == set(), command


def test_documented_mechanisms_exist() -> None:
    texts = [*code_of_all(), *(path.read_text() for path in (ROOT / "engine").rglob("*.py"))]
    used = {name for text in texts for name in re.findall(r"--disable[ =]([a-z0-9_-]+)", text)}
    assert used
    assert used - set(Mechanism) == set()


def test_the_options_page_is_current() -> None:
    made = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "option_docs.py")], capture_output=True, text=True, env=environment()
    ).stdout
    assert (ROOT / "docs" / "options.md").read_text() == made, "run make crds"


def code_of_all() -> list[str]:
    return [code for path in DOCUMENTS for code in CODE.findall(path.read_text())]


@pytest.fixture(scope="module")
def server() -> Iterator[DryServer]:
    with DryServer("--dry-run-step-ms", "1") as server:
        yield server


SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.split("\n")[0])
def test_the_readmes_python_runs(server: DryServer, snippet: str) -> None:
    adapted = snippet.replace("http://127.0.0.1:8080", server.url).replace('"demo"', '"dry"')
    assert adapted != snippet
    command = [sys.executable, "-c", adapted]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "You said: What does textwrap.dedent do?"


def test_the_field_tables_are_current() -> None:
    script = ROOT / "scripts" / "field_docs.py"
    code = f"import runpy; made = runpy.run_path({str(script)!r}); page = made['PAGE'].read_text()"
    code += "; assert made['written'](page) == page, 'run make crds: the tables of fields in docs/api.md are old'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 0, done.stderr[-500:]


def api_tables() -> dict[str, list[tuple[list[str], str]]]:
    """Heading -> rows of docs/api.md: the names in the first cell, and the second cell."""
    sections = re.split(r"^## ", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)[1:]
    tables = {}
    for section in sections:
        rows = re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE)
        tables[section.split("\n")[0]] = [(re.findall(r"`([^`]+)`", names), value) for names, value in rows]
    return tables


@pytest.mark.parametrize(("kind", "request_type"), [("chat", ChatRequest), ("completions", CompletionRequest)])
def test_the_api_tables_are_current(kind: str, request_type: type[ChatRequest] | type[CompletionRequest]) -> None:
    tables = api_tables()
    works = [*tables["Works: chat and completions"], *tables[f"Works: {kind} alone"]]
    without_effect = [row for row in tables["Accepted, without effect"] if kind == "chat" or "both" in row[1]]
    limited = [
        *tables["Accepted at these values only: chat and completions"],
        *tables[f"Accepted at these values only: {kind}"],
    ]
    names = [name for row, _ in [*works, *without_effect, *limited] for name in row]
    assert sorted(names) == sorted([*request_type.__struct_fields__, *request_type.neutral])
    assert sorted(name for row, _ in limited for name in row) == sorted(request_type.neutral)
    for (name,), accepted in limited:
        values = [json.loads(value) for value in re.findall(r"`([^`]+)`", accepted) if value != "n"]
        assert values or accepted.startswith("none"), name
        assert all(request_type.is_neutral(name, value, {}) for value in values), name
        odd = [value for value in ("x", 7, True, False, {"x": 1}, [1]) if not is_one_of(value, tuple(values))]
        taken = [value for value in odd if request_type.is_neutral(name, value, {})]
        assert taken == [], f"{name} takes more than docs/api.md says"
