"""One rank of two, of which the second is slow in each layer: when layers of a pass are told of, on the host's clock.

    python -m tests.gpu2.layers_program JSON

Of the first rank the layers that all ranks have, of the second its own.
"""

import json
import sys
import threading
import time
from itertools import count
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.core.kv_transfer import LayerProgress
from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.distributed.group_layers import GroupLayers
from mini_infer_engine.distributed.member import GroupMember, rank_device
from mini_infer_engine.models.decoder import DecoderLayer
from mini_infer_engine.runtime.model_runner import ModelRunner, load_runner

WORLD = 2
NUM_TOKENS = 100
_LATE_CYCLES = 10_000_000
"""Of a GPU's clock, some 5 ms."""


class Clock:
    """Looks at a pass from the moment when it is told of."""

    def __init__(self, num_layers: int, *, is_first: bool) -> None:
        self.num_layers, self._is_first = num_layers, is_first
        self.progress: LayerProgress | None = None
        self.moments_s: list[float] = []
        """When the first, the first two, ... layers were done."""
        self._thread = threading.Thread(target=self._watch)

    def report(self, own: LayerProgress) -> None:
        """See `Batch.report_layers`."""
        self.progress = GroupLayers(own, self.num_layers) if self._is_first else own
        self._thread.start()

    def _watch(self) -> None:
        assert self.progress is not None
        while len(self.moments_s) < self.num_layers:
            done = self.progress.num_done()
            self.moments_s += [time.monotonic()] * (done - len(self.moments_s))
            time.sleep(2e-5)

    def end(self) -> list[float]:
        """The pass has ended on this rank."""
        if isinstance(self.progress, GroupLayers):
            self.progress.has_ended = True
        self._thread.join(20)
        return self.moments_s


def slow_down() -> None:
    """Every layer of this process begins late."""
    attend = DecoderLayer.attend

    def late(*arguments: Any) -> Any:
        torch.cuda._sleep(_LATE_CYCLES)  # type: ignore[no-untyped-call]  # torch's
        return attend(*arguments)

    DecoderLayer.attend = late  # type: ignore[method-assign]


def load(question: dict[str, Any], store: TCPStore) -> ModelRunner:
    """This rank's part."""
    rank, numbers = question["rank"], count()

    def agree(value: int) -> list[int]:
        number = next(numbers)
        store.set(f"agreed/{number}/{rank}", str(value))
        return [int(store.get(f"agreed/{number}/{other}")) for other in range(WORLD)]

    settings = EngineSettings(tensor_parallel_size=WORLD, **question["settings"])
    member = GroupMember(rank, store, "127.0.0.1", rank_device("auto", rank), settings, agree)
    return load_runner(settings, member, reports_layers=True)


def main() -> None:
    """See the module."""
    question: dict[str, Any] = json.loads(sys.argv[1])
    rank = question["rank"]
    store = TCPStore("127.0.0.1", question["port"], WORLD, is_master=rank == 0, wait_for_workers=False)
    if rank:
        slow_down()
    runner = load(question, store)
    moments = []
    for turn, sampling in enumerate((SamplingParams(), SamplingParams(), None, None)):  # the first compiles
        torch.distributed.barrier(device_ids=[rank])
        clock = Clock(runner.kv_memory().layout.num_layers, is_first=rank == 0)
        row = Row(0, 0, NUM_TOKENS, list(range(NUM_TOKENS)), [turn], sampling)
        runner.collect(runner.launch(Batch([row], 0, report_layers=clock.report)))
        moments.append(clock.end())
    torch.cuda.synchronize()
    print(json.dumps(moments))
    sys.stdout.flush()
    torch.distributed.barrier(device_ids=[rank])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
