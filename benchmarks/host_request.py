"""Where the time of one request goes between the host and the device, stage by stage, through `LLM.generate`.

python benchmarks/host_request.py [--model DIR] [--rounds 200] [--profile CASE]

With --model, random weights on a GPU. Without, no GPU is needed, only triton: the runner prepares each pass as on a GPU
(page tables, packed inputs, slots) and runs nothing. Rows are medians in microseconds: from the call to the launch, the
launch, what the host does while the device works, waiting for it, and from the first token to the return.
"""

import argparse
import contextlib
import cProfile
import pstats
import random
import time
from itertools import pairwise
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import torch

from mini_infer_engine import LLM, SamplingParams
from mini_infer_engine.config.model.kv_groups import UNIFORM
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.batch import Batch
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.speculation.pass_times import GuessCosts
from mini_infer_engine.core_process import build
from mini_infer_engine.core_process.messages import ModelInfo
from mini_infer_engine.offline import loaded_model
from mini_infer_engine.runtime.cuda import device_state
from mini_infer_engine.runtime.cuda import executor as cuda_executor
from mini_infer_engine.runtime.cuda import graphs as cuda_graphs
from mini_infer_engine.runtime.cuda import sampling as cuda_sampling
from mini_infer_engine.runtime.cuda.captured_graphs import CapturedGraphs
from mini_infer_engine.runtime.cuda.graphs import decode_buckets, prefill_buckets
from mini_infer_engine.runtime.cuda.sampling import CudaSampling
from mini_infer_engine.runtime.inputs.batch_tensors import build_inputs
from mini_infer_engine.runtime.memory.device_memory import DeviceMemory
from mini_infer_engine.runtime.model_runner import ModelRunner

VOCABULARY = 150_000
PAGE_SIZE, NUM_PAGES = 128, 30_000
SETTINGS: dict[str, Any] = {"max_model_len": 16_384, "max_num_seqs": 512, "skip_tokenizer_init": True}
STAGES = ("before launch", "launch", "beside the device", "waiting", "after")


def _nothing(*_: object, **__: object) -> None:
    pass


class IdleExecutor(cuda_executor.CudaExecutor):
    """Prepares passes in main memory and answers token 0 at once."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings, device = settings, torch.device("cpu")
        spec = SimpleNamespace(page_size=PAGE_SIZE, page_bytes=0)
        self.pool = SimpleNamespace(
            null_page=NUM_PAGES,
            spec=spec,
            transfer=_nothing,
            swap=_nothing,
            pages=None,
            num_pages=NUM_PAGES,
            host_pages=(),
            kv_cache=UNIFORM,
            states=None,
            hidden=None,
            bounds=None,
            swap_check=None,
        )
        link = SimpleNamespace(size=1)
        model = SimpleNamespace(parameters=lambda: (), attention_layers=())
        config = SimpleNamespace(eos_token_ids=(), recurrence=None, stage=link)
        self.worker = SimpleNamespace(device=device, head=None, link=link, model=model, config=config)
        width = device_state.page_table_width(SETTINGS["max_model_len"], PAGE_SIZE)
        self.state = device_state.DeviceBatchState(settings.max_num_seqs, width, NUM_PAGES, device)
        any_pages = 1 << 30
        self.attention = SimpleNamespace(page_size=PAGE_SIZE, most_pages=lambda tokens, sequences: any_pages)
        self.ops = self.speculation = self.stage = self.layers = self.images = None
        self.max_speculative_rows, self.guess_costs = 0, GuessCosts()
        self._has_unsampled = False
        self.sampling = CudaSampling(self.state, 1, torch.float32, decode_buckets(settings.max_num_seqs), 1, None)
        captured = cuda_graphs.CapturedModel(
            model=None,
            ops=None,
            kernels=None,
            attention=self.attention,
            state=self.state,
            slots=self.sampling.slots,
            logits=self.sampling.logits,
            null_page=NUM_PAGES,
            stage=None,
        )
        shapes = dict.fromkeys(prefill_buckets(8192, launch_bound=True), 0)
        self.graphs = CapturedGraphs(captured, shapes, self.sampling, None, config, settings)
        self.graphs.capture(None, None, defers=False)

    def _run_eagerly(self, batch: Batch, handle: object) -> None:
        build_inputs(batch, PAGE_SIZE, NUM_PAGES, self.worker.device)


def idle_llm(patches: contextlib.ExitStack) -> LLM:
    """Around an IdleExecutor; what touches a device does nothing from now on."""

    def build_idle(settings: EngineSettings, *_: object, record_events: bool, **__: object) -> build.BuiltEngine:
        settings = msgspec.structs.replace(settings, max_num_batched_tokens=8192)
        executor: Any = IdleExecutor(settings)
        memory = DeviceMemory(torch.device("cpu"))
        runner = ModelRunner(executor.worker, executor.pool, executor, 16_384, settings, memory)
        info = ModelInfo(max_model_len=16_384, vocab_size=VOCABULARY, page_size=PAGE_SIZE, num_pages=NUM_PAGES)
        engine = Engine(settings, runner, (), 16_384, "idle", record_events=record_events)
        return build.BuiltEngine(engine, info, "idle", None, _nothing)

    silence_device(patches)
    patches.enter_context(mock.patch.object(loaded_model, "build_engine", build_idle))
    return LLM("dry", **SETTINGS)


def silence_device(patches: contextlib.ExitStack) -> None:
    """What an IdleExecutor would launch on a device does nothing from now on."""
    for owner, name, instead in (
        (device_state, "update_slots", _nothing),
        (device_state, "update_pages", _nothing),
        (cuda_executor, "copy_pages", _nothing),
        (cuda_graphs, "record", lambda *_: SimpleNamespace(replay=_nothing)),
        (cuda_sampling, "record", lambda *_: SimpleNamespace(replay=_nothing)),
        (torch.cuda, "graph_pool_handle", _nothing),
        (torch.cuda, "synchronize", _nothing),
        (torch.cuda, "Event", lambda: SimpleNamespace(record=_nothing, synchronize=_nothing)),
    ):
        patches.enter_context(mock.patch.object(owner, name, instead))


class Clock:
    """When the first pass since `start` was launched and when the last was collected."""

    def __init__(self, runner: Any) -> None:
        self._launch, self._collect = runner.launch, runner.collect
        self._marks: list[float] = []
        self.passes = 0
        runner.launch, runner.collect = self.launch, self.collect

    def launch(self, batch: Batch) -> Any:
        """The runner's, timed."""
        self.passes += 1
        self._marks.append(time.perf_counter())
        handle = self._launch(batch)
        self._marks.append(time.perf_counter())
        return handle

    def collect(self, handle: Any) -> Any:
        """The runner's, timed."""
        self._marks.append(time.perf_counter())
        tokens = self._collect(handle)
        self._marks.append(time.perf_counter())
        return tokens

    def stages_us(self, start: float, end: float) -> list[float]:
        """Of the one pass that was run."""
        marks, self._marks = [start, *self._marks, end], []
        return [(after - before) * 1e6 for before, after in pairwise(marks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder with config.json")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--profile", metavar="CASE", help="also show the functions of this case")
    options = parser.parse_args()
    with contextlib.ExitStack() as patches:
        model = LLM(options.model, load_format="dummy", **SETTINGS) if options.model else idle_llm(patches)
        measure(model, options.rounds, options.profile)


def measure(model: LLM, rounds: int, profiled: str | None) -> None:
    dice = random.Random(0)
    clock = Clock(model._engine._runner)
    profile = cProfile.Profile()

    def generate(prompts: list[list[int]], max_tokens: int) -> list[float]:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        model.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return clock.stages_us(start, time.perf_counter())

    def tokens(count: int) -> list[int]:
        return [dice.randrange(VOCABULARY) for _ in range(count)]

    print(f"{'us':12}", *(f"{stage:>18}" for stage in (*STAGES, "all")))
    for name, cached, new in (("512", 0, 512), ("4096 + 128", 4096, 128), ("4000 + 128", 4000, 128), ("8192", 0, 8192)):
        prefix = tokens(cached)
        generate([prefix + tokens(new)], 1)
        before, found = clock.passes, []
        for _ in range(rounds):
            prompt = prefix + tokens(new)
            if name == profiled:
                profile.enable()
            found.append(generate([prompt], 1))
            profile.disable()
        assert clock.passes == before + rounds, "one pass a request"
        middles = [median(stage) for stage in zip(*found, strict=True)]
        print(f"{name:12}", *(f"{value:18.0f}" for value in (*middles, median(map(sum, found)))))
    if profiled:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)

    elapsed = []
    for max_tokens in (1, 257):
        prompts = [tokens(64) for _ in range(256)]
        start = time.perf_counter()
        generate(prompts, max_tokens)
        elapsed.append(time.perf_counter() - start)
    print(f"256 sequences: {(elapsed[1] - elapsed[0]) / 256 * 1e6:.0f} us a decode step, all included")


if __name__ == "__main__":
    main()
