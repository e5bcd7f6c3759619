"""Two GPUs of one host as two stages of a pipeline beside one GPU, and beside two tensor-parallel ranks.

    python benchmarks/pipeline_parallel.py --models qwen2.5-14b --out FILE
    python benchmarks/pipeline_parallel.py --models qwen3-30b-a3b --kinds "one GPU,two ranks,whole experts" --out FILE

For each model an engine of each kind in a process of its own, with random weights: mixed load W1 (common/loads.py),
time between tokens at batch 1 and 32, time to the first token of 4,096. Ratios are to one GPU in the same run. A
pipeline is for tokens a second: single sequences go through its stages one after the other.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from common import engines
from common.budget import Budget
from common.models import model_folder
from common.report import make_parser, save, words
from common.side_by_side import measure_alone, show_ratios
from engine_offline import measure

KINDS: dict[str, dict[str, Any]] = {
    "one GPU": {},
    "two stages": {"pipeline_parallel_size": 2},
    "two ranks": {"tensor_parallel_size": 2},
    "whole experts": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
USUAL = ("one GPU", "two stages", "two ranks")
"""The others are for mixtures of experts."""
FIGURES = ("w1 tok_s", "itl ms bs 1", "itl ms bs 32", "ttft ms 4096")
SMOKE_FIGURES = ("itl ms", "ttft", "w1")
TARGETS = {"w1 tok_s": 1.6}
"""Two stages to one GPU, of qwen2.5-14b: at least."""


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--models", type=words, default=words("qwen2.5-14b"), metavar="NAME,...")
    parser.add_argument("--kinds", type=words, default=list(USUAL), metavar="KIND,...", help=", ".join(KINDS))
    parser.add_argument("--disable", type=words, default=[], metavar="NAME,...", help="mechanisms to do without")
    parser.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="of a pass; default: the engine's own")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(KINDS):
        parser.error(f"--kinds: {', '.join(sorted(unknown))}: there are {', '.join(KINDS)}")
    budget = Budget(options.time_limit_s)
    result: dict[str, Any] = {"runs": {}, "errors": []}
    with tempfile.TemporaryDirectory() as root:
        for model in [engines.SMOKE_MODEL] if options.smoke else options.models:
            folder = model_folder(model, Path(root))
            for kind in options.kinds[:2] if options.smoke else options.kinds:
                measure_kind(model, folder, kind, options, budget, result)
    save(options.out, result)
    return int(bool(result["errors"]))


def measure_kind(model: str, folder: Path, kind: str, options: Any, budget: Budget, result: dict[str, Any]) -> None:
    """One engine, which has the GPUs for itself."""
    if not budget.allows(f"{model}, {kind}", 40.0):
        return
    figure_names = SMOKE_FIGURES if options.smoke else FIGURES
    settings = KINDS[kind] | {"disable": options.disable}
    if options.max_num_batched_tokens is not None:
        settings |= {"max_num_batched_tokens": options.max_num_batched_tokens}
    runs = measure_alone(measure, model, kind, "ours", folder, settings, figure_names, options, budget, result)
    targets = TARGETS if model == "qwen2.5-14b" else {}
    show_ratios(model, runs, "one GPU", "two stages", "stages / one", targets)


if __name__ == "__main__":
    os.environ |= {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
    raise SystemExit(main())
