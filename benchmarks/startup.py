"""From exec to the first token over HTTP, with random weights: every cache of compiled code cold, then warm.

    python benchmarks/startup.py --servers ours,vllm --models qwen2.5-7b --out FILE

Servers run in turns, with the same flags. "open": the port answers; "ready": it says so; "token": a streamed request of
eight token ids, sent again and again from the start, brings its first token. engine_serving.py shows cold starts too,
and goes on with the server that it has started.
"""

import tempfile
from pathlib import Path
from typing import Any

from common import engines, servers
from common.budget import Budget
from common.models import MEASURED, model_folder
from common.report import Runs, collect, log_line, make_parser, medians_of, print_table, save, words
from common.targets import ratio_target, verdict_cells


def main() -> int:
    parser = make_parser(__doc__, starts_peers=True)
    parser.add_argument("--servers", type=words, default=words("ours,vllm"), metavar="NAME,...")
    parser.add_argument("--models", type=words, default=MEASURED, metavar="NAME,...")
    parser.add_argument("--states", type=words, default=words("cold,warm"), metavar="STATE,...")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--max-num-seqs", type=int, default=512)
    options = parser.parse_args()
    budget = Budget(options.time_limit_s)
    kinds = [kind for kind in options.servers if engines.is_present(kind)]
    models = [engines.SMOKE_MODEL] if options.smoke else options.models
    if not options.smoke:
        servers.read_packages()
        log_line("packages are read")
    runs: Runs = {}
    result: dict[str, Any] = {"runs": runs, "errors": []}
    with tempfile.TemporaryDirectory() as root:
        for model, kind in [(model, kind) for _ in range(options.repeats) for model in models for kind in kinds]:
            with tempfile.TemporaryDirectory() as caches:
                for state in options.states:
                    if not budget.allows(kind, options.peer_start_s if kind == "vllm" else 0.0):
                        break
                    folder, server = model_folder(model, Path(root)), f"{model}, {kind}, {state}"
                    settings = {"max_num_seqs": options.max_num_seqs}
                    try:
                        with (
                            budget.spending(kind),
                            servers.started(kind, folder, settings, Path(caches), options.smoke) as started,
                        ):
                            found = started.first_token(budget.left_s)
                    except (TimeoutError, OSError) as error:
                        log_line(f"{server}: {error}")
                        result["errors"].append(f"{server}: {error}")
                        break
                    collect(runs, server, found)
                    log_line(f"{server}: " + ", ".join(f"{name} {value:.2f}" for name, value in found.items()))
                    save(options.out, result)
    show(runs)
    save(options.out, result)
    return int(bool(result["errors"]))


def show(runs: Runs) -> None:
    """Medians of each "model, server, state", ours beside the peer's."""
    rows = []
    medians = medians_of(runs)
    for server, figures in medians.items():
        model, kind, state = server.split(", ")
        values = [figures[name] for name in ("open s", "ready s", "token s")]
        peer = medians.get(f"{model}, vllm, {state}")
        ratio = values[-1] / peer["token s"] if peer and kind == "ours" else None
        rows.append([server, *values, ratio, *verdict_cells(ratio_target(model, f"start, {state}, token s"), ratio)])
    print_table(["", "open s", "ready s", "token s", "/ vllm", "target", ""], rows)


if __name__ == "__main__":
    raise SystemExit(main())
