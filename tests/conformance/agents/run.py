"""Codex CLI and Claude Code through the gateway: `python -m tests.conformance.agents.run [AGENT ...]`.

Each has a session in which the model calls a tool of the agent's own, which runs on this machine, and answers from its
result. The model's tokens are script.json's; prompts, tools, parsing, the Responses and the Messages API are real.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.conformance import environments
from tests.conformance.servers import SCRIPTED, Platform, running_platform

HERE = Path(__file__).parent
QUESTION = "Count the lines of notes.txt"
ANSWER = "notes.txt has seven lines."
LIMIT_S = 120
_CODEX_CONFIG = """\
model = "{model}"
model_provider = "local"
web_search = "disabled"

[model_providers.local]
name = "mini-infer"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "LOCAL_KEY"
"""


def codex(platform: Platform, home: Path, work: Path) -> str:
    """What a session of Codex CLI ends with. AssertionError: its tool did not run."""
    (home / "config.toml").write_text(_CODEX_CONFIG.format(model=SCRIPTED, url=platform.gateway))
    command = [_program("codex", "codex"), "exec", "--json", "--skip-git-repo-check", "-s", "danger-full-access"]
    out = _run([*command, QUESTION], home, work, CODEX_HOME=str(home), LOCAL_KEY="any")
    items = [event["item"] for event in _json_lines(out) if event.get("type") == "item.completed"]
    ran = [item for item in items if item["type"] == "command_execution"]
    assert [item["exit_code"] for item in ran] == [0], f"one command should have run: {out[-2000:]}"
    return str(next(item["text"] for item in reversed(items) if item["type"] == "agent_message"))


def claude_code(platform: Platform, home: Path, work: Path) -> str:
    """What a session of Claude Code ends with. AssertionError: its tool did not run."""
    command = [_program("claude-code", "claude"), "-p", QUESTION, "--output-format", "json", "--allowedTools", "Bash"]
    out = _run(
        [*command, "--max-turns", "5"],
        home,
        work,
        ANTHROPIC_BASE_URL=platform.gateway,
        ANTHROPIC_API_KEY="any",
        ANTHROPIC_MODEL=SCRIPTED,
        ANTHROPIC_SMALL_FAST_MODEL=SCRIPTED,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_AUTOUPDATER="1",
        DISABLE_TELEMETRY="1",
    )
    result = next(line for line in _json_lines(out) if line.get("type") == "result")
    assert not result["is_error"], result["result"]
    assert result["num_turns"] == 2, "the call, and the answer to its result"
    return str(result["result"])


AGENTS: dict[str, Callable[[Platform, Path, Path], str]] = {"codex": codex, "claude-code": claude_code}


def main() -> int:
    """Run, print, and return 1 where a session did not end as the script has it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("agents", nargs="*", help=f"of {', '.join(AGENTS)} (default: all)")
    chosen: list[str] = parser.parse_args().agents or list(AGENTS)
    failed = 0
    with running_platform(HERE / "script.json") as platform:
        for name in chosen:
            outcome = _session(name, platform)
            failed += outcome != ANSWER
            print(f"{name} {_version(name)}: {'as scripted' if outcome == ANSWER else outcome}", flush=True)
    print(f"{len(chosen) - failed} passed, {failed} failed")
    return int(failed > 0)


def _session(name: str, platform: Platform) -> str:
    """Its last message, or what went wrong."""
    homes = environments.FOLDER / "homes"  # not below /tmp: Codex refuses to live there
    homes.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=homes) as home, tempfile.TemporaryDirectory() as work:
        (Path(work) / "notes.txt").write_text("line\n" * 7)
        try:
            return AGENTS[name](platform, Path(home), Path(work))
        except (AssertionError, StopIteration, subprocess.TimeoutExpired) as error:
            return f"{type(error).__name__}: {error}"


def _run(command: list[str], home: Path, work: Path, **changes: str) -> str:
    """Its output: both, for errors stand on either."""
    environment = environments.clean_environment(HOME=str(home), **changes)
    environment["PATH"] = f"{environments.node().parent}:{environment['PATH']}"
    done = subprocess.run(
        command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S
    )
    text = done.stdout + done.stderr
    (environments.FOLDER / "logs" / f"agent-{Path(command[0]).name}.txt").write_text(text)
    return text


def _json_lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def _program(name: str, command: str) -> str:
    return str(environments.node_environment(name) / "node_modules" / ".bin" / command)


def _version(name: str) -> str:
    """Of the npm package."""
    package = {"codex": "@openai/codex", "claude-code": "@anthropic-ai/claude-code"}[name]
    path = environments.node_environment(name) / "node_modules" / package / "package.json"
    return str(json.loads(path.read_text())["version"])


if __name__ == "__main__":
    sys.exit(main())
