"""Two engines of one model in this process, with real transports, that compute prompts for each other."""

import select
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import KVSource, Output, Request, SamplingParams
from mini_infer_engine.core_process.kv_transfer import start_transfer
from mini_infer_engine.kv_transfer.transfer_port import TransferPort
from mini_infer_engine.kv_transfer.worker import TransferWorker
from mini_infer_engine.runtime.model_runner import load_runner
from tests.engine.server.dry_server import free_port

LENGTH = 8
"""Tokens that are generated for a prompt."""


@dataclass
class Side:
    """An engine with a transfer port."""

    engine: Engine
    worker: TransferWorker
    port: int

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def num_received(self) -> int:
        """Sequences that other engines have computed; the transfer thread reports them a little later."""
        return self.engine.stats().kv_transfer.received

    def is_at_rest(self) -> bool:
        """True if every page and every slot is free, and no transfer is open."""
        stats, scheduler = self.engine.stats().kv_transfer, self.engine.scheduler
        pins = stats.pinned_pages + stats.open_leases
        return not pins and scheduler.kv_cache.pool.usage == 0 and scheduler.slots.num_free == scheduler.slots.num_slots


class Pair:
    """Two engines of one model, `here` and `there`, whose steps alternate."""

    def __init__(self, folder: Path, transport: Any, **changes: Any) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.here, self.there = (self._side(folder, transport, changes) for _ in range(2))
        self.num_requests = 0

    def _side(self, folder: Path, transport: Any, changes: dict[str, Any]) -> Side:
        defaults = {"kv_cache_memory": 16_000_000, "max_num_seqs": 4, "max_num_batched_tokens": 48}
        settings = EngineSettings(model=str(folder), device="cpu", kv_transport=transport, **(defaults | changes))
        runner = load_runner(settings, reports_layers=True)
        engine = Engine(runner.settings, runner, (), runner.max_model_len, "revision")
        weights: Future[str] = Future()
        weights.set_result("weights")
        port = free_port()
        worker = start_transfer(
            self.context,
            settings,
            TransferPort(host="127.0.0.1", port=port),
            engine,
            "revision",
            runner.kv_memory(),
            runner.open_transport,
            weights,
        )
        return Side(engine, worker, port)

    def add(self, side: Side, prompt: Sequence[int], source: KVSource | None = None, **more: Any) -> str:
        """Queues a greedy request, and returns its id."""
        self.num_requests += 1
        name = str(self.num_requests)
        max_tokens = more.pop("max_tokens", LENGTH)
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        side.engine.add(
            Request(
                request_id=name,
                prompt_token_ids=list(prompt),
                sampling=sampling,
                noise_seed=0,
                kv_source=source,
                **more,
            )
        )
        return name

    def run(self) -> tuple[dict[str, list[int]], list[Output]]:
        """Runs both engines until nothing is left; returns the tokens of each request, and all outputs."""
        made: dict[str, list[int]] = {}
        outputs = []
        while any(side.engine.has_work or side.engine.stats().kv_transfer.open_leases for side in self.sides):
            if all(side.engine.only_receives or not side.engine.has_work for side in self.sides):
                select.select([side.worker.core_woken for side in self.sides], [], [], 0.02)
            for side in self.sides:
                for output in side.engine.step():
                    assert not output.error
                    made.setdefault(output.request_id, []).extend(output.token_ids)
                    outputs.append(output)
        return made, outputs

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.here, self.there

    def texts(
        self, side: Side, prompts: Sequence[Sequence[int]], source: KVSource | None = None, max_tokens: int = LENGTH
    ) -> list[list[int]]:
        """Returns the tokens of these prompts, which are queued at once."""
        names = [self.add(side, prompt, source, max_tokens=max_tokens) for prompt in prompts]
        made, _ = self.run()
        return [made[name] for name in names]

    def reset(self) -> None:
        """Empties both prefix caches."""
        assert all(side.engine.reset_prefix_cache() for side in self.sides)

    def close(self) -> None:
        for side in self.sides:
            side.worker.stop()
        self.context.destroy(linger=0)


def prefill_at(side: Side) -> KVSource:
    """Returns the source of prompts that a side computes."""
    return KVSource(address=side.address, how="prefill")
