"""One rank of two: collectives of the GPUs against sums in fp64, eagerly and in a CUDA graph that is replayed."""

import json
import sys
import time
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's

from mini_infer_engine.communication.gpu_collectives import GpuCollectives, connect_gpus
from mini_infer_engine.communication.peer_memory import PeerMemory
from mini_infer_engine.config.tensor_parallel import TensorParallel

WORLD = 2
_LATE_CYCLES = 80_000_000
"""Of a GPU's clock, some 45 ms."""


def values(rank: int, rows: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    """What a rank adds: the same on every machine."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn((rows, width), generator=generator).to(dtype).cuda()


def error(actual: Tensor, exact: Tensor) -> float:
    """In units of the dtype's epsilon at the largest value."""
    return float((actual.double() - exact).abs().max() / exact.abs().max()) / torch.finfo(actual.dtype).eps


def check_sums(group: GpuCollectives, rows: int, width: int, dtype: torch.dtype) -> float:
    """The worst error of sums, of sums with a norm, in turns as layers take them, and of the same in a graph."""
    rank, peers = group.parallel.rank, group.peers
    weight = values(7, 1, width, dtype, 5)[0]
    worst = 0.0
    inputs = [values(rank, rows, width, dtype, seed) for seed in range(4)]
    exact = [sum(values(other, rows, width, dtype, seed).double() for other in range(WORLD)) for seed in range(4)]
    residual, outputs = torch.zeros((rows, width), dtype=dtype, device="cuda"), list[Tensor]()

    def run() -> None:
        outputs.clear()
        residual.zero_()
        outputs.append(group.begin(inputs[0].clone()))
        for x in inputs[1:]:
            memory = None if peers is None else peers.summand(rows, width, dtype)
            if peers is not None and x is inputs[2] and peers.pushes(rows, width, dtype):  # two summands of one rank
                outputs.append(peers.sum_add_norm(torch.stack([x / 2, x / 2]), residual, weight, 1e-6))
            elif peers is not None and memory is not None:
                outputs.append(peers.sum_add_norm(memory.copy_(x), residual, weight, 1e-6))
            else:
                residual.add_(group.all_reduce(x.clone()))

    def look() -> float:
        found = [error(outputs[0], exact[0]), error(residual, exact[1] + exact[2] + exact[3])]
        if len(outputs) > 1:
            total = residual.double()
            scale = (total.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt()
            found.append(error(outputs[-1], total * scale * weight.double()))
        return max(found)

    run()
    worst = max(worst, look())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(50):  # ranks drift apart between replays
        graph.replay()
    torch.cuda.synchronize()
    return max(worst, look())


def seconds_after_a_late_rank(peers: PeerMemory, rank: int, sums: int = 200) -> float:
    """Of sums of 256 rows, before the first of which one rank comes late."""
    summands = torch.zeros((256, 3584), dtype=torch.bfloat16, device="cuda")
    peers.sum(summands)
    torch.cuda.synchronize()
    torch.distributed.barrier(device_ids=[rank])
    begin_s = time.perf_counter()
    if rank:
        torch.cuda._sleep(_LATE_CYCLES)  # type: ignore[no-untyped-call]  # torch's
    for _ in range(sums):
        peers.sum(summands)
    torch.cuda.synchronize()
    return time.perf_counter() - begin_s


def check_gather(group: GpuCollectives, rows: int, columns: int, width: int, dtype: torch.dtype) -> bool:
    """Whether parts stand side by side, several times one after the other."""
    rank, peers = group.parallel.rank, group.peers
    parts = [values(other, rows, columns, dtype, 9) for other in range(WORLD)]
    expected = torch.cat(parts, dim=1)[:, :width]
    found = []
    for turn in range(4):
        memory = None if peers is None else peers.logits_part(rows, columns, dtype)
        x = parts[rank] + turn
        x = x if memory is None else memory.copy_(x)
        found.append((group.gather_columns(x, width), turn))
    return all(torch.equal(made, (expected + turn)) for made, turn in found)


def main() -> None:
    """Run as `python -m tests.gpu2.rank_program JSON`, on two GPUs at once."""
    question: dict[str, Any] = json.loads(sys.argv[1])
    rank = question["rank"]
    torch.cuda.set_device(rank)
    store = TCPStore("127.0.0.1", question["port"], WORLD, is_master=rank == 0, wait_for_workers=False)
    device = torch.device("cuda", rank)
    parallel = TensorParallel(rank, WORLD)
    group = connect_gpus(parallel, store, device, one_host=True, disabled=tuple(question["disabled"]))
    assert isinstance(group, GpuCollectives)
    errors, gathered = {}, {}
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16) if "late" not in question else ():
            for rows, width in (
                (1, 64),
                (1, 3584),
                (3, 5120),
                (32, 3584),
                (200, 3584),
                (256, 4096),
                (700, 1024),
                (4096, 3584),
            ):
                errors[f"{rows} x {width} {dtype}"] = check_sums(group, rows, width, dtype)
            for rows, columns, width in (
                (1, 64, 100),
                (1, 76032, 152064),
                (5, 2048, 4096),
                (300, 4096, 8000),
                (256, 76032, 152064),
            ):
                gathered[f"{rows} x {columns} {dtype}"] = check_gather(group, rows, columns, width, dtype)
        if question.get("late"):
            assert group.peers is not None
            errors["seconds"] = seconds_after_a_late_rank(group.peers, rank)
    torch.cuda.synchronize()
    print(json.dumps({"kind": group.kind, "errors": errors, "gathered": gathered}))
    sys.stdout.flush()
    torch.distributed.barrier(device_ids=[rank])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
