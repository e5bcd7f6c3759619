"""Two GPUs of one host beside one, with random weights, and the all-reduce that stands between their layers.

    python benchmarks/tensor_parallel.py --models qwen2.5-7b,qwen2.5-14b --out FILE

For each model an engine on two GPUs and one on one, in processes of their own: time between tokens at batch 1, 8 and
32, time to the first token of 4,096, mixed load W1 (common/loads.py). Ratios are of two GPUs to one in the same run.
All-reduces of [rows, hidden] in a CUDA graph, 20 one after another: our kernel, and with residual and RMSNorm fused
both of ours, which read peers' memory or write into it; NCCL, and torch's own one-shot kernel.
`--engines vllm` starts the peer with two GPUs as well.
"""

import multiprocessing
import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import engines
from common.budget import Budget
from common.isolation import Isolated, IsolationError
from common.models import CONFIGS, kv_bytes_per_token, model_folder
from common.report import Runs, collect, integers, log_line, make_parser, print_table, save, words
from common.side_by_side import measure_alone, show_ratios
from engine_offline import measure

if TYPE_CHECKING:
    import torch

FIGURES = ("itl ms bs 1", "itl ms bs 8", "itl ms bs 32", "ttft ms 4096", "w1 tok_s")
SMOKE_FIGURES = ("itl ms", "ttft", "w1")
TARGETS = {"itl ms bs 1": 0.64, "itl ms bs 32": 0.68, "ttft ms 4096": 0.58, "w1 tok_s": 1.75}
"""Of qwen2.5-7b, two GPUs to one: at most, and at least for tokens a second. Batch 1 is also to be below 2.3 ms."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
CALLS = 20
_KV_TOKENS = 280_000
_TOGETHER_BYTES = 35 * 10**9
"""Of weights: engines on one and on two GPUs fit the same 141 GB."""
_RANKS = 2


def all_reduce_rank(rank: int, port: int, hidden: int, answers: Any) -> None:
    """One of two ranks: microseconds of each kind of all-reduce at each number of rows, by rank 0."""
    try:
        answers.put((rank, _all_reduce_times(rank, port, hidden)))
    except BaseException:
        answers.put((rank, traceback.format_exc()))
        raise


def _all_reduce_times(rank: int, port: int, hidden: int) -> dict[str, dict[int, float]]:
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's

    from mini_infer_engine.communication.gpu_collectives import GpuCollectives, connect_gpus
    from mini_infer_engine.config.parallelism.tensor_parallel import TensorParallel
    from mini_infer_engine.kernels.all_reduce.pushed_sum import MAX_ROWS

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    store = TCPStore("127.0.0.1", port, _RANKS, is_master=rank == 0, wait_for_workers=False)
    group = connect_gpus(TensorParallel(rank, _RANKS), store, device, one_host=True, disabled=())
    assert isinstance(group, GpuCollectives)
    peers, found = group.peers, dict[str, dict[int, float]]()
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    for rows in ROWS:
        x = torch.zeros((rows, hidden), dtype=torch.bfloat16, device=device)
        residual = torch.zeros_like(x)

        def nccl(x: torch.Tensor = x) -> None:
            torch.distributed.all_reduce(x)

        kinds: dict[str, Callable[[], object]] = {"nccl": nccl}
        if peers is not None and peers.summand(rows, hidden, x.dtype) is not None:

            def ours(rows: int = rows) -> None:
                memory = peers.summand(rows, hidden, torch.bfloat16)
                assert memory is not None
                peers.sum(memory)

            def fused(pushed_rows: int, rows: int = rows, residual: torch.Tensor = residual) -> None:
                memory = peers.summand(rows, hidden, torch.bfloat16)
                assert memory is not None
                usual, peers.pushed_rows = peers.pushed_rows, pushed_rows
                peers.sum_add_norm(memory, residual, weight, 1e-6)
                peers.pushed_rows = usual

            kinds |= {"ours": ours, "pulled + norm": partial(fused, 0)}
            if rows <= MAX_ROWS:
                kinds["pushed + norm"] = partial(fused, MAX_ROWS)
        if (torchs := _torchs_one_shot(rows, hidden, device)) is not None:
            kinds["torch one_shot"] = torchs
        for name, call in kinds.items():
            found.setdefault(name, {})[rows] = _graph_microseconds(call)
    return found


def _torchs_one_shot(rows: int, hidden: int, device: "torch.device") -> Callable[[], object] | None:
    import torch
    from torch.distributed import _symmetric_memory as symmetric_memory

    group = torch.distributed.group.WORLD
    assert group is not None
    memory = symmetric_memory.empty(rows, hidden, dtype=torch.bfloat16, device=device)
    symmetric_memory.rendezvous(memory, group)
    memory.zero_()
    operator = getattr(torch.ops.symm_mem, "one_shot_all_reduce", None)
    return None if operator is None else lambda: operator(memory, "sum", group.group_name)


def _graph_microseconds(call: Callable[[], object], replays: int = 30) -> float:
    """Of one call among CALLS in a graph; all ranks measure the same at the same time."""
    import torch

    for _ in range(4):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    torch.distributed.barrier()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / replays / CALLS


def all_reduces(hidden: int, limit_s: float) -> dict[str, dict[int, float]]:
    """Both ranks' processes, of which the first one's figures count. RuntimeError: one failed, or was too slow."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=all_reduce_rank, args=(rank, port, hidden, answers)) for rank in range(_RANKS)]
    for process in ranks:
        process.start()
    found: dict[int, Any] = {}
    try:
        for _ in ranks:
            rank, answer = answers.get(timeout=limit_s)
            if isinstance(answer, str):
                raise RuntimeError(f"rank {rank}: {answer}")
            found[rank] = answer
    finally:
        for process in ranks:
            process.kill()
    times: dict[str, dict[int, float]] = found[0]
    return times


def main() -> int:
    parser = make_parser(__doc__, starts_peers=True)
    parser.add_argument(
        "--models", type=words, default=words("qwen2.5-7b,qwen2.5-14b,mistral-small-24b"), metavar="NAME,..."
    )
    parser.add_argument("--engines", type=words, default=words("ours"), metavar="NAME,...")
    parser.add_argument("--sizes", type=integers, default=[2, 1], metavar="N,...", help="of tensor parallelism")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument(
        "--disable", type=words, default=[], metavar="NAME,...", help="mechanisms of ours to do without"
    )
    parser.add_argument("--all-reduce", action="store_true", help="nothing but the all-reduce")
    options = parser.parse_args()
    budget = Budget(options.time_limit_s)
    result: dict[str, Any] = {"runs": {}, "all_reduce_us": {}, "errors": []}
    hides = sorted({CONFIGS[model]["hidden_size"] for model in options.models}) if not options.smoke else []
    for hidden in hides:
        try:
            times = all_reduces(hidden, min(120.0, budget.left_s))
        except Exception as error:  # a timeout of the queue, or what a rank says: the engines are measured anyway
            result["errors"].append(f"all-reduce of {hidden}: {type(error).__name__}: {error}")
            log_line(result["errors"][-1])
            continue
        result["all_reduce_us"][hidden] = times
        print_table(
            [f"us of [rows, {hidden}]", *map(str, ROWS)], [[k, *(v.get(r) for r in ROWS)] for k, v in times.items()]
        )
        save(options.out, result)
    if not options.all_reduce:
        with tempfile.TemporaryDirectory() as root:
            measure_engines(options, budget, Path(root), result)
    save(options.out, result)
    return int(bool(result["errors"]))


def measure_engines(options: Any, budget: Budget, root: Path, result: dict[str, Any]) -> None:
    """Every model by every engine and size: ours start together where memory allows, and are measured in turns."""
    models = [engines.SMOKE_MODEL] if options.smoke else options.models
    kinds = [kind for kind in options.engines if engines.is_present(kind)]
    for model in models:
        folder = model_folder(model, root)
        together = ["ours"] if not options.smoke and _weight_bytes(model) < _TOGETHER_BYTES else []
        if "ours" in kinds and together:
            measure_together(model, folder, options, budget, result)
        for kind, size in [(kind, size) for kind in kinds if kind not in together for size in options.sizes]:
            measure_size(model, folder, kind, size, options, budget, result)


def measure_together(model: str, folder: Path, options: Any, budget: Budget, result: dict[str, Any]) -> None:
    """Our engines of all sizes hold the GPUs together, with a KV cache of as many tokens; one at a time is measured."""
    runs: Runs = result["runs"].setdefault(model, {})
    with ExitStack() as stack:
        running: dict[str, Isolated] = {}
        for size in options.sizes:
            share = engines.share_of_gpu(kv_bytes_per_token(str(folder)) * _KV_TOKENS // size)
            settings = share | {"max_num_seqs": options.max_num_seqs, "tensor_parallel_size": size}
            settings |= {"disable": options.disable}
            arguments = ("ours", str(folder), settings, False, None, *FIGURES)
            running[f"ours x{size}"] = stack.enter_context(Isolated(measure, *arguments))
            running[f"ours x{size}"].start_step()
        try:
            for label, isolated in running.items():
                for part in islice(isolated.answers(budget.left_s), 1):
                    collect(runs, label, part)
            for round_ in range(options.rounds):
                for label, isolated in running.items():
                    if budget.allows(f"{model}, {label}", 20.0):
                        with budget.spending(f"{model}, {label}"):
                            for part in takewhile(bool, isolated.parts(budget.left_s)):
                                collect(runs, label, part)
                    save(options.out, result)
                log_line(f"round {round_ + 1}")
                show(model, runs)
        except IsolationError as error:
            result["errors"].append(f"{model}: {error}")
            log_line(result["errors"][-1])


def _weight_bytes(model: str) -> int:
    """About, in bf16."""
    config = CONFIGS[model]
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    attention = 2 * (heads + config["num_key_value_heads"]) * head_dim * hidden
    layer = attention + 3 * hidden * config["intermediate_size"]
    return int(2 * (config["num_hidden_layers"] * layer + 2 * config["vocab_size"] * hidden))


def measure_size(
    model: str, folder: Path, kind: str, size: int, options: Any, budget: Budget, result: dict[str, Any]
) -> None:
    """One engine of one size, which has the GPUs for itself."""
    label = f"{kind} x{size}"
    if not budget.allows(f"{model}, {label}", options.peer_start_s if kind == "vllm" else 40.0):
        return
    figure_names = SMOKE_FIGURES if options.smoke else FIGURES
    settings = {"tensor_parallel_size": size, "disable": options.disable}  # of the latter peers are told nothing
    show(model, measure_alone(measure, model, label, kind, folder, settings, figure_names, options, budget, result))


def show(model: str, runs: Runs) -> None:
    """Medians of each size, two GPUs to one, and the targets."""
    show_ratios(model, runs, "ours x1", "ours x2", "x2 / x1", TARGETS if model == "qwen2.5-7b" else {})


if __name__ == "__main__":
    os.environ |= {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
    raise SystemExit(main())
