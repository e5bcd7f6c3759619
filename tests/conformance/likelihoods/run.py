"""lm-evaluation-harness: its likelihoods through our /v1/completions equal those of its transformers backend.

`python -m tests.conformance.likelihoods.run`; tasks and documents are our own small ones, nothing comes from a hub.
"""

import json
import subprocess
import sys
from pathlib import Path

from tests.conformance import environments
from tests.conformance.servers import running_engine

LIMIT = 1e-3
LIMIT_S = 900


def main() -> int:
    """1 where a likelihood differs by more than the limit, or a greedy flag."""
    with running_engine("demo") as url:
        out = subprocess.run(
            [environments.python_environment("lm-eval"), Path(__file__).parent / "compare.py"],
            env=environments.clean_environment(
                CONFORMANCE_URL=url,
                CONFORMANCE_DEMO_MODEL=str(environments.DEMO_MODEL),
                HF_DATASETS_CACHE=str(environments.FOLDER / "datasets"),
                OMP_NUM_THREADS="1",
                CUDA_VISIBLE_DEVICES="",
            ),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    (environments.FOLDER / "logs" / "lm-eval.txt").write_text(out.stdout + out.stderr)
    lines = [line for line in out.stdout.splitlines() if line.startswith('{"compared"')]
    if not lines:
        print(f"lm-eval {environments.versions('lm-eval')['lm-eval']} failed:\n{out.stderr[-2000:]}")
        return 1
    found = json.loads(lines[0])
    passes = found["largest_difference"] <= LIMIT and not found["greedy_differs"]
    print(f"lm-eval {environments.versions('lm-eval')['lm-eval']}: {found}")
    print(f"{int(passes)} passed, {int(not passes)} failed")
    return int(not passes)


if __name__ == "__main__":
    sys.exit(main())
