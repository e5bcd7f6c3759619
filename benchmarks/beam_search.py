"""Tokens a second of beam search beside sampling with the same batch: as many sequences, as many tokens of each.

python -m benchmarks.beam_search [--model demo] [--prompts 4] [--width 4] [--tokens 64] [--device cpu]
"""

import argparse
import statistics
import time
from collections.abc import Callable

from mini_infer_engine import LLM, BeamSearchParams, SamplingParams


def seconds(work: Callable[[], object]) -> float:
    """That one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Print the medians of interleaved rounds, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    longest = asked.prompt_tokens + asked.tokens + 1
    llm = LLM(asked.model, device=asked.device, max_model_len=longest)
    prompts = [
        {"prompt_token_ids": [3 + (index * 31 + place * 7) % 200 for place in range(asked.prompt_tokens)]}
        for index in range(asked.prompts)
    ]
    beams = BeamSearchParams(beam_width=asked.width, max_tokens=asked.tokens, ignore_eos=True)
    sampled = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=asked.tokens, ignore_eos=True)
    copies = [prompt for prompt in prompts for _ in range(asked.width)]
    searching, sampling = [], []
    for _ in range(asked.rounds + 1):
        searching.append(seconds(lambda: llm.beam_search(prompts, beams)))
        sampling.append(seconds(lambda: llm.generate(copies, sampled, use_tqdm=False)))
    made = asked.prompts * asked.width * asked.tokens  # the first round compiles and fills the prefix cache
    search_s, sample_s = statistics.median(searching[1:]), statistics.median(sampling[1:])
    print(f"{asked.prompts} prompts of {asked.prompt_tokens} tokens, {asked.width} beams, {asked.tokens} tokens each")
    print(f"beam search {made / search_s:8.0f} tokens/s\nsampling    {made / sample_s:8.0f} tokens/s")
    print(f"ratio       {sample_s / search_s:8.2f}")


if __name__ == "__main__":
    main()
