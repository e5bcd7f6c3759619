"""What log probabilities cost: tokens a second of one batch without them, and with the 1, 5 and 20 most likely tokens.

    python benchmarks/logprobs.py [--models qwen3-0.6b,qwen2.5-7b] [--device auto] [--batch 32] [--out FILE]

The kinds take turns in one engine, round after round; figures are medians. Wanted: with 5 at least 0.95 of none's.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.model_by_model import measure_models
from common.models import CONFIGS, model_folder
from common.report import Runs, make_parser, medians_of, print_table, words

from mini_infer_engine import LLM, SamplingParams

TOPS = (None, 1, 5, 20)
"""Most likely tokens that are told at each position."""
_PROMPT_TOKENS = 64


def tokens_per_s(llm: LLM, options: argparse.Namespace, top: int | None) -> float:
    """Of one batch whose prompts are cached after the first time."""
    prompts = [
        {"prompt_token_ids": [3 + (index * 31 + place * 7) % 200 for place in range(_PROMPT_TOKENS)]}
        for index in range(options.batch)
    ]
    params = SamplingParams(temperature=0.8, max_tokens=options.tokens, ignore_eos=True, logprobs=top)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed_s = time.perf_counter() - begin
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    num_logprobs = sum(len(output.outputs[0].logprobs or ()) for output in outputs)
    assert num_logprobs == (0 if top is None else made)
    return made / elapsed_s


def label_of(top: int | None) -> str:
    """The figure's name."""
    return "none tok_s" if top is None else f"top {top} tok_s"


def measure(name: str, options: argparse.Namespace) -> Iterator[dict[str, float]]:
    """All kinds in turns, a round a part; the first compiles and fills the prefix cache, and is not told."""
    with tempfile.TemporaryDirectory() as root:
        settings: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True} if name in CONFIGS else {}
        longest = _PROMPT_TOKENS + options.tokens + 1
        folder = model_folder(name, Path(root))
        llm = LLM(folder, device=options.device, max_model_len=longest, max_num_seqs=options.batch, **settings)
        for round_ in range(options.rounds + 1):
            order = TOPS if round_ % 2 else TOPS[::-1]
            rates = {label_of(top): tokens_per_s(llm, options, top) for top in order}
            yield rates if round_ else {}


def show(runs: Runs) -> dict[str, dict[str, float]]:
    """Print medians and their ratios to none's; returns the ratios."""
    ratios: dict[str, dict[str, float]] = {}
    for name, figures in medians_of(runs).items():
        plain = figures[label_of(None)]
        ratios[name] = {label: rate / plain for label, rate in figures.items()}
        print_table([name, "tokens/s", "of none"], [[label, figures[label], ratios[name][label]] for label in figures])
    return ratios


def main() -> None:
    """Measure model after model, and write what there is after each."""
    parser = make_parser(__doc__)
    parser.add_argument("--models", "--model", type=words, default=words("qwen3-0.6b,qwen2.5-7b"), metavar="NAME,...")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256, help="output tokens a sequence")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.smoke:
        options.models, options.device, options.batch, options.tokens, options.rounds = ["tiny"], "cpu", 2, 4, 1
    measure_models(options, measure, show)


if __name__ == "__main__":
    main()
