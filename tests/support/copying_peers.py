"""Peer memory of two ranks that are threads: sums of some rows and more are pending until their halves have come."""

from typing import Any

import torch
from torch import Tensor

from mini_infer_engine.kernels.all_reduce.overlapped_sum import FLAG_BYTES, FLAGS, halves, launch_add_received
from tests.support.thread_group import Table


class CopyingPeers:
    """See `peer_memory.PeerMemory`. All other sums and gathers go another way."""

    def __init__(self, rank: int, table: Table, least_rows: int) -> None:
        self.rank, self.table, self.least_rows = rank, table, least_rows
        self.events: list[str] = []
        self.number = 0

    def pushes(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        return False

    def can_sum(self, summands: Tensor) -> bool:
        return False

    def summand(self, rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        self.check_added()
        return None

    def logits_part(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor | None:
        self.check_added()
        return None

    def overlaps(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        return rows >= self.least_rows

    def check_added(self) -> None:
        """Nothing is pending when something else begins."""
        assert self.events[-2:] in ([], ["add 0", "add 1"])

    def begin_overlapped(self, rows: int, width: int, dtype: torch.dtype) -> "CopiedSum":
        self.check_added()
        self.number += 1
        return CopiedSum(self, rows, width, dtype)


class CopiedSum:
    """See `overlapped_sums.OverlappedSum`: what a rank sends, the other one takes when it adds it."""

    def __init__(self, peers: CopyingPeers, rows: int, width: int, dtype: torch.dtype) -> None:
        self._peers, self.halves = peers, halves(rows, width)
        self.summand = torch.full((rows, width), torch.nan, dtype=dtype)

    def send(self, half: int) -> None:
        assert self.summand[self.halves[half]].isfinite().all()
        self._peers.events.append(f"send {half}")

    def add_norm(self, half: int, *places: Any) -> None:
        peers, summand = self._peers, self.summand[self.halves[half]]
        received = peers.table.exchange(peers.rank, summand.clone())[1 - peers.rank]
        flags = torch.full((FLAGS, FLAG_BYTES // 4), peers.number, dtype=torch.int32)
        residual, weight, eps, out = places
        launch_add_received(
            summand,
            received,
            flags[half],
            peers.number,
            torch.zeros(1, dtype=torch.int32),
            residual=residual,
            weight=weight,
            eps=eps,
            out=out,
        )
        peers.events.append(f"add {half}")
