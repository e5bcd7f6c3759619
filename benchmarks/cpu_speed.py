"""The demo model on a CPU: our `LLM` against transformers' static batches and itself one by one, and a warm prefix.

Every round measures each contender once, in turns, so that a busy machine is busy for all; ratios are taken inside a
round and their median counts. fp32, greedy, the same prompts, lengths and torch threads for all; EOS is ignored.

    python benchmarks/cpu_speed.py [--rounds 5] [--threads N] [--json FILE]
"""

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers

from mini_infer_engine import LLM, SamplingParams
from mini_infer_engine.model_path import resolve_model

REQUESTS = 16
PREFIX_TOKENS = 1000
VOCABULARY = range(300, 4000)
"""Ordinary tokens: what they say does not matter where lengths are fixed."""
WANTED = {
    "equal: ours / transformers": 1.5,
    "ragged: ours / transformers": 2.5,
    "equal: ours / ours one by one": 4.0,
    "prefix: TTFT saved": 0.7,
}


@dataclass(frozen=True, slots=True)
class Load:
    """Sixteen requests: prompts as token ids, and how many tokens each is to be answered with."""

    prompts: list[list[int]]
    output_lengths: list[int]


def equal_load(dice: random.Random) -> Load:
    """All prompts and all answers of one length."""
    return Load([dice.choices(VOCABULARY, k=128) for _ in range(REQUESTS)], [128] * REQUESTS)


def ragged_load(dice: random.Random) -> Load:
    """Prompts of 16 to 512 tokens, answers of 16 to 256: evenly spread, prompts shuffled against answers."""
    prompt_lengths = [16 + 496 * index // (REQUESTS - 1) for index in range(REQUESTS)]
    output_lengths = [16 + 240 * index // (REQUESTS - 1) for index in range(REQUESTS)]
    dice.shuffle(prompt_lengths)
    dice.shuffle(output_lengths)
    return Load([dice.choices(VOCABULARY, k=length) for length in prompt_lengths], output_lengths)


class Ours:
    """`LLM` as it comes. Prompts of a round are new to its prefix cache."""

    def __init__(self, model: str) -> None:
        self.llm = LLM(model, dtype="float32", device="cpu")

    def together(self, load: Load) -> int:
        """All at once. Returns the tokens made."""
        params = [_fixed(length) for length in load.output_lengths]
        prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in load.prompts]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def one_by_one(self, load: Load) -> int:
        """Each when the one before has ended."""
        pairs = zip(load.prompts, load.output_lengths, strict=True)
        return sum(self.together(Load([prompt], [length])) for prompt, length in pairs)


class Static:
    """transformers: one batch, padded on the left; all of it runs until the longest answer is there."""

    def __init__(self, model: str) -> None:
        directory = resolve_model(model, None)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def together(self, load: Load) -> int:
        """All at once. Returns the tokens that were asked for; what a row makes beyond them is waste."""
        longest = max(map(len, load.prompts))
        padding = [longest - len(prompt) for prompt in load.prompts]
        ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, load.prompts, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
        config = transformers.GenerationConfig(max_new_tokens=max(load.output_lengths), do_sample=False, pad_token_id=0)
        with torch.inference_mode():
            made = self.model.generate(ids, attention_mask=mask, generation_config=config)
        assert made.shape[1] == longest + max(load.output_lengths)
        return sum(load.output_lengths)


def _fixed(length: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)


def tokens_per_s(run: Callable[[Load], int], load: Load) -> float:
    """Output tokens of a second of wall clock, prompts' time included."""
    start = time.perf_counter()
    tokens = run(load)
    return tokens / (time.perf_counter() - start)


def prefix_ttft_s(ours: Ours, dice: random.Random) -> tuple[float, float]:
    """Seconds to the first token of a prompt of 1,000 tokens and a question, when new and with another question."""
    prefix = dice.choices(VOCABULARY, k=PREFIX_TOKENS)
    times = []
    for _ in range(2):
        start = time.perf_counter()
        ours.together(Load([prefix + dice.choices(VOCABULARY, k=16)], [1]))
        times.append(time.perf_counter() - start)
    return times[0], times[1]


def measure(ours: Ours, static: Static, dice: random.Random) -> dict[str, float]:
    """One round."""
    equal, again, ragged = equal_load(dice), equal_load(dice), ragged_load(dice)
    cold, warm = prefix_ttft_s(ours, dice)
    return {
        "equal: ours": tokens_per_s(ours.together, equal),
        "equal: transformers": tokens_per_s(static.together, equal),
        "equal: ours one by one": tokens_per_s(ours.one_by_one, again),
        "ragged: ours": tokens_per_s(ours.together, ragged),
        "ragged: transformers": tokens_per_s(static.together, ragged),
        "prefix: TTFT new, ms": cold * 1000,
        "prefix: TTFT repeated, ms": warm * 1000,
    }


def ratios(figures: dict[str, float]) -> dict[str, float]:
    """What is promised, of one round."""
    return {
        "equal: ours / transformers": figures["equal: ours"] / figures["equal: transformers"],
        "ragged: ours / transformers": figures["ragged: ours"] / figures["ragged: transformers"],
        "equal: ours / ours one by one": figures["equal: ours"] / figures["equal: ours one by one"],
        "prefix: TTFT saved": 1 - figures["prefix: TTFT repeated, ms"] / figures["prefix: TTFT new, ms"],
    }


@dataclass(frozen=True, slots=True)
class Machine:
    """What the figures belong to."""

    cpu: str
    threads: int
    torch: str
    transformers: str


def machine() -> Machine:
    """What this machine is."""
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    cpu = names[0] if names else platform.processor()
    return Machine(cpu, torch.get_num_threads(), torch.__version__, transformers.__version__)


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def main() -> int:
    """Rounds, a table, JSON. Exit status 1: a ratio is below what is promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="where to write the figures of all rounds")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ours, static, dice = Ours(options.model), Static(options.model), random.Random(0)
    measure(ours, static, dice)  # warm-up
    rounds = [measure(ours, static, dice) for _ in range(options.rounds)]
    figures = {name: median(figures[name] for figures in rounds) for name in rounds[0]}
    reached = {name: median(ratios(figures)[name] for figures in rounds) for name in WANTED}
    here = machine()
    print(f"{here.cpu}, {here.threads} threads, torch {here.torch}, transformers {here.transformers}")
    print(f"{REQUESTS} requests at once, fp32; medians of {options.rounds} rounds; tokens/s unless said otherwise\n")
    for name, figure in figures.items():
        print(f"  {name:32} {figure:8.1f}")
    print()
    for name, wanted in WANTED.items():
        verdict = "ok" if reached[name] >= wanted else "TOO LOW"
        print(f"  {name:32} {reached[name]:8.2f}  (wanted {wanted}: {verdict})")
    if options.json is not None:
        content = {"machine": asdict(here), "median": figures, "ratios": reached, "rounds": rounds}
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return int(any(reached[name] < wanted for name, wanted in WANTED.items()))


if __name__ == "__main__":
    raise SystemExit(main())
