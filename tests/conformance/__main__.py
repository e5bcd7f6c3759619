"""`make conformance`: every suite in turn, or those named: `python -m tests.conformance vllm clients`."""

import argparse
import subprocess
import sys

SUITES = {
    "vllm": "tests.conformance.vllm_tests.run",
    "clients": "tests.conformance.clients.run",
    "agents": "tests.conformance.agents.run",
    "likelihoods": "tests.conformance.likelihoods.run",
    "loads": "tests.conformance.loads.run",
    "openapi": "tests.conformance.openapi.run",
}


def main() -> int:
    """Run the suites, each in a process of its own; 1 where one fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)} (default: all)")
    chosen: list[str] = parser.parse_args().suites or list(SUITES)
    unknown = [name for name in chosen if name not in SUITES]
    if unknown:
        parser.error(f"no suite {unknown[0]}: there are {', '.join(SUITES)}")
    failed = [name for name in chosen if subprocess.run([sys.executable, "-m", SUITES[name]]).returncode]
    print(f"{len(chosen) - len(failed)} suites passed, {len(failed)} failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
