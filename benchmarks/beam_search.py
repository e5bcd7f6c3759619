"""Tokens a second of beam search beside sampling with the same batch: as many sequences, as many tokens of each.

    python benchmarks/beam_search.py [--models qwen3-0.6b,qwen2.5-7b] [--device auto] [--width 4] [--out FILE]

The two take turns in one engine, round after round; figures are medians. Wanted: at least 0.70 of sampling's.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common.model_by_model import measure_models
from common.models import CONFIGS, model_folder
from common.report import Runs, make_parser, medians_of, print_table, words

from mini_infer_engine import LLM, BeamSearchParams, SamplingParams


def seconds(work: Callable[[], object]) -> float:
    """That one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(name: str, options: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Both in turns, a round a part; the first compiles and fills the prefix cache, and is not told."""
    longest = options.prompt_tokens + options.tokens + 1
    prompts = [
        {"prompt_token_ids": [3 + (index * 31 + place * 7) % 200 for place in range(options.prompt_tokens)]}
        for index in range(options.prompts)
    ]
    beams = BeamSearchParams(beam_width=options.width, max_tokens=options.tokens, ignore_eos=True)
    sampled = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=options.tokens, ignore_eos=True)
    copies = [prompt for prompt in prompts for _ in range(options.width)]
    made = options.prompts * options.width * options.tokens
    with tempfile.TemporaryDirectory() as root:
        settings: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True} if name in CONFIGS else {}
        llm = LLM(model_folder(name, Path(root)), device=options.device, max_model_len=longest, **settings)
        for round_ in range(options.rounds + 1):
            search_s = seconds(lambda: llm.beam_search(prompts, beams))
            sample_s = seconds(lambda: llm.generate(copies, sampled, use_tqdm=False))
            yield {"beam search tok_s": made / search_s, "sampling tok_s": made / sample_s} if round_ else {}


def show(runs: Runs) -> dict[str, float]:
    """Print medians, and beam search's part of sampling's; returns those."""
    found = medians_of(runs)
    ratios = {name: figures["beam search tok_s"] / figures["sampling tok_s"] for name, figures in found.items()}
    rows = [[name, *figures.values(), ratios[name]] for name, figures in found.items()]
    print_table(["model", "beam search tokens/s", "sampling tokens/s", "of sampling"], rows)
    return ratios


def main() -> None:
    """Measure model after model, and write what there is after each."""
    parser = make_parser(__doc__)
    parser.add_argument("--models", "--model", type=words, default=words("qwen3-0.6b,qwen2.5-7b"), metavar="NAME,...")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.smoke:
        options.models, options.device, options.rounds = ["tiny"], "cpu", 1
        options.prompts, options.width, options.tokens = 2, 2, 4
    measure_models(options, measure, show)


if __name__ == "__main__":
    main()
