"""Tokens a second of one model by our file and by transformers' code: 32 greedy requests of 128 + 128 tokens at once.

    python benchmarks/transformers_backend.py --model qwen2.5-7b --out FILE

Each implementation has a process of its own, with random weights; the best of three runs after one that warms up.
Beside vLLM's transformers backend: `beside_vllm.py transformers:MODEL:GB`.
"""

import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from common import engines
from common.isolation import Figures
from common.models import kv_bytes_per_token, model_folder, vocabulary
from common.report import log_line, make_parser, print_table, save, words
from common.together import Start, measure_alternately

_REQUESTS, _PROMPT, _ANSWER, _RUNS = 32, 128, 128, 4
_KV_TOKENS = 32_768


def measure(folder: str, impl: str, smoke: bool) -> Iterator[Figures]:
    """Yields once when the engine is ready, then its figures."""
    settings = engines.SETTINGS | {"max_num_seqs": _REQUESTS, "model_impl": impl}
    settings |= engines.share_of_gpu(_KV_TOKENS * kv_bytes_per_token(folder))
    engine = engines.load("ours", folder, settings | (engines.SMOKE_SETTINGS if smoke else {}))
    yield {}
    dice, best = random.Random(0), 0.0
    requests, answer = (4, 8) if smoke else (_REQUESTS, _ANSWER)
    for _ in range(_RUNS):
        prompts = [[dice.randrange(vocabulary(folder, 150_000)) for _ in range(_PROMPT)] for _ in range(requests)]
        begin = time.perf_counter()
        tokens = engine.run(prompts, [answer] * requests, 0.0)
        best = max(best, tokens / (time.perf_counter() - begin))
    yield {impl: {"tok_s": best}}


def main() -> int:
    """Measures, prints and saves. Returns the exit code."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--impls", type=words, default=words("native,transformers"))
    options = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}

    def note(label: str, part: Figures) -> None:
        figures.update(part)
        log_line(f"{label}: {part}")
        save(options.out, {"model": options.model, "figures": figures})

    with tempfile.TemporaryDirectory() as scratch:
        folder = str(model_folder(engines.SMOKE_MODEL if options.smoke else options.model, Path(scratch)))
        starts: dict[str, Start] = {impl: (measure, (folder, impl, options.smoke)) for impl in options.impls}
        errors = measure_alternately(starts, options.time_limit_s, note)
    native = figures.get("native", {}).get("tok_s")
    rows = [[impl, own["tok_s"], own["tok_s"] / native if native else float("nan")] for impl, own in figures.items()]
    print_table(["implementation", "tok/s", "of native"], rows)
    return int(bool(errors))


if __name__ == "__main__":
    raise SystemExit(main())
