"""vLLM's server tests against mini-infer: `python -m tests.conformance.vllm_tests.run [FILE ...]`.

Reality is compared with expected.yaml, and a difference in either direction fails: a test that passes although it is
not expected to has to be listed anew, too. `--write` lists what was seen, for tests that are not listed or differ.
"""

import argparse
import importlib.metadata
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tests.conformance import environments
from tests.conformance.vllm_tests import verdicts
from tests.conformance.vllm_tests.verdicts import Seen

HERE = Path(__file__).parent
SHIM = HERE / "shim"
TEST_LIMIT_S = 120
LONG_CONTEXT = 32_768


def main() -> int:
    """Run, compare, print; 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="only these, below vLLM's tests/")
    parser.add_argument("--write", action="store_true", help="take what was seen into expected.yaml, to be reviewed")
    parser.add_argument("-k", dest="keyword", default="", help="as pytest's")
    arguments = parser.parse_args()
    table = tomllib.loads((HERE / "files.toml").read_text())
    files = [name for name in table["files"] if not arguments.files or any(f in name for f in arguments.files)]
    sources = prepared_sources(table["requirement"])
    keyword: str = arguments.keyword
    seen: dict[str, Seen] = {}
    for name in files:
        flags = table["flags"].get(name.partition("/")[0], table["flags"]["others"])
        model = demo_with_a_long_context(thinks=name in table["thinking"])
        found = run_file(sources, name, [*flags, *(["-k", keyword] if keyword else [])], model)
        seen |= found
        print(f"{name}: {verdicts.counts(found)}", flush=True)
        if arguments.write:
            verdicts.write(verdicts.merged(verdicts.read(), found))
    whole = [] if keyword else files
    differences = verdicts.differences(verdicts.read(), seen, whole)
    print("\n".join(differences))
    print(f"{verdicts.counts(seen)}; {len(differences)} differ from expected.yaml")
    return int(bool(differences))


def prepared_sources(requirement: str) -> Path:
    """vLLM's tests in a folder of their own, without vLLM beside them and with our `tests.utils`."""
    package = environments.source_package(requirement)
    target = environments.FOLDER / "vllm-tests"
    if not target.is_dir():
        shutil.copytree(package / "tests", target / "tests")
        shutil.copytree(package / "examples", target / "examples")
        (target / "tests" / "conftest.py").unlink()
    (target / "tests" / "utils.py").write_text("from shim_utils import *\n")
    return target


def demo_with_a_long_context(*, thinks: bool = False) -> Path:
    """The demo model with a larger context in its config.json, for tests that ask for one and not for what it says.

    `thinks`: it thinks where a request says nothing, as the models do of tests that are about thinking.
    """
    target = environments.FOLDER / ("demo-thinking" if thinks else "demo-long")
    shutil.copytree(environments.DEMO_MODEL, target, dirs_exist_ok=True)
    _change_json(target / "config.json", max_position_embeddings=LONG_CONTEXT)
    _change_json(target / "tokenizer_config.json", model_max_length=LONG_CONTEXT)
    if thinks:
        template = (target / "chat_template.jinja").read_text()
        changed = template.replace("{%- if enable_thinking -%}", "{%- if enable_thinking | default(true) -%}")
        (target / "chat_template.jinja").write_text(changed)
    return target


def _change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def run_file(sources: Path, name: str, flags: list[str], model: Path) -> dict[str, Seen]:
    """Outcomes by node id; a file of its own process, so that no fixture outlives it."""
    logs = environments.FOLDER / "logs"
    logs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [environments.python_environment("vllm-tests"), "-m", "pytest", f"tests/{name}", *flags]
        command += ["-p", "mini_infer_shim", "-p", "no:cacheprovider", "-q", "--tb=short", "-o", "asyncio_mode=auto"]
        command += ["-o", "junit_family=xunit1", f"--timeout={TEST_LIMIT_S}", f"--junitxml={report}", "--rootdir=."]
        out = subprocess.run(
            command, cwd=sources, env=_environment(sources, logs, model), capture_output=True, text=True
        )
        (logs / (name.replace("/", "-") + ".txt")).write_text(out.stdout + out.stderr)
        if not report.exists():
            return {f"{name}::": Seen("failed", "pytest did not start:" + out.stderr[-500:])}
        return _outcomes(report, name)


def _environment(sources: Path, logs: Path, model: Path) -> dict[str, str]:
    return environments.clean_environment(
        PYTHONPATH=str(SHIM),
        CONFORMANCE_SOURCES=str(sources),
        CONFORMANCE_DEMO_MODEL=str(model),
        CONFORMANCE_SERVE=shlex.join([sys.executable, str(SHIM / "seeded_serve.py")]),
        CONFORMANCE_LOGS=str(logs),
        CONFORMANCE_VERSION=importlib.metadata.version("mini-infer"),
    )


def _outcomes(report: Path, name: str) -> dict[str, Seen]:
    outcomes: dict[str, Seen] = {}
    module = "tests." + name.removesuffix(".py").replace("/", ".")
    for case in ElementTree.parse(report).iter("testcase"):
        classes = case.get("classname", "").removeprefix(module).strip(".")
        node = "::".join(part for part in (classes.replace(".", "::"), case.get("name", "")) if part)
        result = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        kind = "passed" if result is None else "skipped" if result.tag == "skipped" else "failed"
        message = "" if result is None else (result.get("message") or "")
        key = f"{name}::{node}"
        if key not in outcomes or kind != "passed":
            outcomes[key] = Seen(kind, message[:300])
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
