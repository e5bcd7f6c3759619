"""schemathesis on the engine's OpenAPI document: `python -m tests.conformance.openapi.run [SECONDS]`.

Requests made from the document, right and wrong ones, go to an engine without a model, to one with the demo model, and
through a gateway. None may be answered by a 5xx, or by a status, a content type or a shape that the document lacks.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

from tests.conformance import environments
from tests.conformance.servers import running_platform

SCRIPT = Path(__file__).parents[1] / "clients" / "script.json"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
)
GATEWAY_CHECKS = ("not_a_server_error", "content_type_conformance", "response_schema_conformance")
"""The gateway has statuses of its own, and paths of the document that it does not pass on."""
PHASES = "examples,coverage,fuzzing"
SPARE_S = 120


def main() -> int:
    """Run, print, and return 1 where something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", nargs="?", type=int, default=60, help="of requests to each server (default: 60)")
    seconds: int = parser.parse_args().seconds
    failed = 0
    with running_platform(SCRIPT) as platform:
        document = f"{platform.demo_engine}/openapi.json"
        for name, url, checks in (
            ("engine without a model", platform.scripted_engine, CHECKS),
            ("demo engine", platform.demo_engine, CHECKS),
            ("gateway", platform.gateway, GATEWAY_CHECKS),
        ):
            out, status = _schemathesis(document, url, checks, seconds)
            (environments.FOLDER / "logs" / f"schemathesis-{name.replace(' ', '-')}.txt").write_text(out)
            cases = re.search(r"Test cases:\s+(.+)", out)
            failed += status != 0
            print(f"schemathesis {environments.versions('schemathesis')['schemathesis']}, {name}: ", end="")
            print(cases[1] if cases else out[-1500:], flush=True)
            if status:
                print(out[-4000:], flush=True)
    print(f"{3 - failed} passed, {failed} failed")
    return int(failed > 0)


def _schemathesis(document: str, url: str, checks: tuple[str, ...], seconds: int) -> tuple[str, int]:
    """Its output and exit status."""
    program = environments.python_environment("schemathesis").with_name("st")
    how = ["--workers=1", "--no-shrink", "--generation-deterministic", "--continue-on-failure", "--request-timeout=30"]
    what = [document, f"--url={url}", f"--checks={','.join(checks)}", f"--phases={PHASES}"]
    done = subprocess.run(
        [program, "run", *what, *how, f"--max-time={seconds}", "--warnings=off"],
        cwd=environments.FOLDER,
        env=environments.clean_environment(),
        capture_output=True,
        text=True,
        timeout=seconds + SPARE_S,
    )
    return done.stdout + done.stderr, done.returncode


if __name__ == "__main__":
    sys.exit(main())
