"""guidellm and aiperf with their defaults against an engine and a gateway: `python -m tests.conformance.loads.run`.

Short: what counts is that no request fails, and that they find what they measure (streams, usage, health), not speed.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.conformance import environments
from tests.conformance.servers import DEMO, running_platform

SCRIPT = Path(__file__).parents[1] / "clients" / "script.json"
REQUESTS = 100
INPUT_TOKENS, OUTPUT_TOKENS = 64, 16
LIMIT_S = 600


def guidellm(url: str, folder: Path) -> str:
    """Its count of requests. The back end's defaults: chat, streamed, checked first by GET /health."""
    _run(
        "guidellm",
        ["run", "--backend", f"kind=openai_http,target={url},model={DEMO}"],
        ["--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={REQUESTS}"],
        ["--data", f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}"],
        ["--tokenizer", f"kind=hf_auto,model={environments.DEMO_MODEL}", "--disable-console-interactive"],
        folder=folder,
    )
    metrics = json.loads((folder / "benchmarks.json").read_text())["benchmarks"][0]["metrics"]
    totals = metrics["request_totals"]
    assert totals["successful"] == REQUESTS, totals
    assert metrics["output_token_count"]["successful"]["mean"] == OUTPUT_TOKENS, "ignore_eos and usage"
    return f"{totals['successful']} requests"


def aiperf(url: str, folder: Path) -> str:
    """Its count of requests, chat, streamed."""
    _run(
        "aiperf",
        ["profile", "-m", DEMO, "--url", url, "--endpoint-type", "chat", "--streaming", "--concurrency", "4"],
        ["--request-count", str(REQUESTS), "--isl", str(INPUT_TOKENS), "--osl", str(OUTPUT_TOKENS)],
        ["--tokenizer", str(environments.DEMO_MODEL), "--ui", "none", "--artifact-dir", str(folder)],
        folder=folder,
        HF_HUB_OFFLINE="",  # its offline mode takes no folder for a tokenizer
    )
    result = json.loads((folder / "profile_export_aiperf.json").read_text())
    assert int(result["request_count"]["avg"]) == REQUESTS, result["request_count"]
    assert not result.get("error_summary"), result["error_summary"]
    return f"{REQUESTS} requests"


TOOLS: dict[str, Callable[[str, Path], str]] = {"guidellm": guidellm, "aiperf": aiperf}


def main() -> int:
    """Run each against both, print, and return 1 where one failed."""
    failed = 0
    with running_platform(SCRIPT) as platform:
        for name, tool in TOOLS.items():
            for place, url in (("engine", platform.demo_engine), ("gateway", platform.gateway)):
                outcome, passes = _verdict_of(tool, url)
                failed += not passes
                print(f"{name} {environments.versions(name)[name]}, {place}: {outcome}", flush=True)
    print(f"{2 * len(TOOLS) - failed} passed, {failed} failed")
    return int(failed > 0)


def _verdict_of(tool: Callable[[str, Path], str], url: str) -> tuple[str, bool]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return tool(url, Path(folder)), True
        except (AssertionError, OSError, KeyError, subprocess.TimeoutExpired) as error:
            return f"{type(error).__name__}: {error}", False


def _run(name: str, *parts: list[str], folder: Path, **changes: str) -> None:
    program = environments.python_environment(name).with_name(name)
    done = subprocess.run(
        [program, *(word for part in parts for word in part)],
        cwd=folder,
        env=environments.clean_environment(HOME=str(folder), OMP_NUM_THREADS="1", **changes),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    (environments.FOLDER / "logs" / f"load-{name}.txt").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-500:]}"


if __name__ == "__main__":
    sys.exit(main())
