"""One rank of two: collectives of the GPUs against sums in fp64, eagerly and in a CUDA graph that is replayed."""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's

from mini_infer_engine.communication.gpu_collectives import GpuCollectives, connect_gpus
from mini_infer_engine.communication.peer_memory import PeerMemory
from mini_infer_engine.config.parallelism.tensor_parallel import TensorParallel

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


def seconds_after_a_late_rank(add: Callable[[], object], rank: int, sums: int) -> float:
    """Of so many sums, before the first of which one rank comes late."""
    add()
    torch.cuda.synchronize()
    torch.distributed.barrier(device_ids=[rank])
    begin_s = time.perf_counter()
    if rank:
        torch.cuda._sleep(_LATE_CYCLES)  # type: ignore[no-untyped-call]  # torch's
    for _ in range(sums):
        add()
    torch.cuda.synchronize()
    return time.perf_counter() - begin_s


def overlapped(peers: PeerMemory, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """As products make halves of x, and the next ones ask for them: the norm."""
    exchange, out = peers.begin_overlapped(x.shape[0], x.shape[1], x.dtype), torch.empty_like(residual)
    for half, rows in enumerate(exchange.halves):
        exchange.summand[rows].copy_(x[rows])
        exchange.send(half)
    for half, rows in enumerate(exchange.halves):
        exchange.add_norm(half, residual[rows], weight, 1e-6, out[rows])
    return out


class Alternating:
    """Exchanges of all kinds one after the other, which share buffers, while one rank or the other comes late."""

    WIDTH = 3584
    ROWS: ClassVar[dict[str, tuple[int, ...]]] = {
        "overlapped": (2048, 2049, 5000, 8192),
        "one-shot": (300, 1024, 2000, 4096),
        "pushed": (1, 64, 256),
        "embeddings": (3, 2500),
        "gather": (5, 300),
    }
    HOW_OFTEN = (6, 4, 3, 1, 1)

    def __init__(self, group: GpuCollectives) -> None:
        assert group.peers is not None
        self.group, self.peers, self.rank = group, group.peers, group.parallel.rank
        self.weight = values(7, 1, self.WIDTH, torch.bfloat16, 5)[0]
        self.wrong, self.digest = (torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2))
        self.worst_norm = torch.zeros((), device="cuda")

    def run(self, steps: int) -> dict[str, float]:
        """Numbers that differ from the exact ones, how far norms are off, and what all bits come to."""
        same, own, kind = random.Random(3), random.Random(self.rank), ""
        for step in range(steps):
            before, (kind,) = kind, same.choices(list(self.ROWS), self.HOW_OFTEN)
            if kind == before == "embeddings":
                kind = "pushed"  # every pass has other exchanges between its embeddings and the next one's
            summands = self._summands(same.choice(self.ROWS[kind]), step)
            if own.random() < 0.3:
                torch.cuda._sleep(own.randrange(4_000_000))  # type: ignore[no-untyped-call]  # torch's
            getattr(self, f"_{kind.replace('-', '_')}")(summands)
        return {
            "wrong": int(self.wrong),
            "norm": float(self.worst_norm) / torch.finfo(torch.bfloat16).eps,
            "digest": int(self.digest),
        }

    def _summands(self, rows: int, step: int) -> list[Tensor]:
        device = torch.device("cuda", self.rank)
        generator = torch.Generator(device)  # the same numbers on every GPU of a kind
        return [
            torch.randn(
                (rows, self.WIDTH),
                generator=generator.manual_seed(10 * step + rank),
                dtype=torch.bfloat16,
                device=device,
            )
            for rank in range(WORLD)
        ]

    def _check(self, found: Tensor, exact: Tensor) -> None:
        self.wrong += (found != exact).sum()
        self.digest.mul_(31).add_(found.view(torch.int16).sum(dtype=torch.int64))

    def _check_sum(self, summands: list[Tensor], add: Callable[[Tensor], Tensor]) -> None:
        """Of what `add` makes of a residual stream, which is exact but for the norm."""
        residual = summands[0].roll(1, 0)
        exact = (residual.float() + (summands[0].float() + summands[1].float())).to(residual.dtype)
        out = add(residual)
        self._check(residual, exact)
        self.digest.mul_(31).add_(out.view(torch.int16).sum(dtype=torch.int64))
        wide = exact.float()
        normed = wide * (wide.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt() * self.weight.float()
        self.worst_norm = torch.maximum(self.worst_norm, (out.float() - normed).abs().max() / normed.abs().max())

    def _overlapped(self, summands: list[Tensor]) -> None:
        own = summands[self.rank]
        self._check_sum(summands, lambda residual: overlapped(self.peers, own, residual, self.weight))

    def _one_shot(self, summands: list[Tensor]) -> None:
        own = summands[self.rank]
        memory = self.peers.summand(own.shape[0], own.shape[1], own.dtype)
        assert memory is not None
        memory.copy_(own)
        self._check_sum(summands, lambda residual: self.peers.sum_add_norm(memory, residual, self.weight, 1e-6))

    def _pushed(self, summands: list[Tensor]) -> None:
        own = summands[self.rank]
        self._check_sum(summands, lambda residual: self.peers.sum_add_norm(own, residual, self.weight, 1e-6))

    def _embeddings(self, summands: list[Tensor]) -> None:
        exact = (summands[0].float() + summands[1].float()).to(summands[0].dtype)
        self._check(self.group.begin(summands[self.rank]), exact)

    def _gather(self, summands: list[Tensor]) -> None:
        own, width = summands[self.rank], 2 * self.WIDTH - 100
        memory = self.peers.logits_part(own.shape[0], own.shape[1], own.dtype)
        assert memory is not None
        self._check(self.group.gather_columns(memory.copy_(own), width), torch.cat(summands, dim=1)[:, :width])


def overlapping(peers: PeerMemory) -> Callable[[], Tensor]:
    """One overlapped sum after another, of the same rows."""
    x, weight = torch.zeros((2048, 3584), dtype=torch.bfloat16, device="cuda"), torch.ones(3584, device="cuda")
    return partial(overlapped, peers, x, torch.zeros_like(x), weight)


def seconds_without_the_other(group: GpuCollectives, rank: int) -> float:
    """Of some overlapped sums for which the other rank does not live any more, and the group is let go meanwhile."""
    peers = group.peers
    assert peers is not None
    add = overlapping(peers)
    add()
    torch.cuda.synchronize()
    torch.distributed.barrier(device_ids=[rank])
    torch.cuda.synchronize()
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    begin_s = time.perf_counter()
    threading.Timer(0.3, peers.release).start()
    for _ in range(3):
        add()
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
        for dtype in (torch.float32, torch.bfloat16) if "only" not in question else ():
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
        if (only := question.get("only")) is not None:
            assert group.peers is not None
            if only == "late":
                summands = torch.zeros((256, 3584), dtype=torch.bfloat16, device="cuda")
                errors["seconds"] = seconds_after_a_late_rank(partial(group.peers.sum, summands), rank, sums=200)
            elif only == "late overlap":
                errors["seconds"] = seconds_after_a_late_rank(overlapping(group.peers), rank, sums=50)
            elif only == "alternating":
                errors |= Alternating(group).run(steps=200)
            else:
                print(json.dumps(seconds_without_the_other(group, rank)), flush=True)
                os._exit(0)  # NCCL would wait for the other
    torch.cuda.synchronize()
    print(json.dumps({"kind": group.kind, "errors": errors, "gathered": gathered}))
    sys.stdout.flush()
    torch.distributed.barrier(device_ids=[rank])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
