"""Host time of one engine step with a runner that does nothing: what scheduling costs beside the model.

python benchmarks/host_step.py [--sequences 256] [--steps 2000]
"""

import argparse
import gc
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mini_infer_engine.config.model.kv_groups import UNIFORM
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.batch import NO_SWAP, Batch, TokenMasks
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core.result import PassResult


class NullRunner:
    """Answers token 7 at once."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.kv_cache = UNIFORM
        self.swap_space = NO_SWAP
        self.eviction_obstacle = None
        self.host_memory = None
        self.max_speculative_rows = 0

    def refuses(self, request: Request) -> str | None:
        """Nothing."""

    def launch(self, batch: Batch) -> int:
        """The number of rows."""
        return len(batch.rows)

    def guesses(self, handle: Any) -> Mapping[int, Sequence[int]]:
        """None."""
        del handle
        return {}

    def sample(self, handle: Any, masks: TokenMasks) -> None:
        """No pass waits for masks."""

    def collect(self, handle: int) -> PassResult:
        """Only last chunks are planned here, so each row has a token."""
        return PassResult([(7,)] * handle)


def decode_step_us(
    sequences: int, steps: int, depth: int, page_size: int, caching: bool, speculates: bool = False
) -> float:
    """Microseconds of a step in which every sequence decodes, by the median of 20 windows.

    `speculates`: with prompt look-up that is never right, so that nearly no pass guesses.
    """
    tokens = 64 + 2 * steps + 8
    settings = EngineSettings(
        model="null",
        max_num_seqs=sequences,
        max_num_batched_tokens=sequences * 64,
        step_depth=depth,
        enable_prefix_caching=caching,
        speculative_method="ngram" if speculates else None,
    )
    runner = NullRunner(sequences * (tokens // page_size + 2), page_size)
    runner.max_speculative_rows = sequences if speculates else 0
    engine = Engine(settings, runner, (0,), tokens, "null")
    for index in range(sequences):
        prompt = [index + 1] * 64
        engine.add(Request(request_id=str(index), prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=None)))
    for _ in range(200 if speculates else 3):  # until it is known that guessing does not pay
        engine.step()
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as the core process does
    windows = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(steps // 20):
            engine.step()
        windows.append((time.perf_counter() - start) / (steps // 20) * 1e6)
        engine.take_events()
    assert engine.stats().last_step_decode_tokens == sequences
    return sorted(windows)[len(windows) // 2]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    for depth in (0, 1):
        for page_size in (16, 256):
            for caching in (True, False):
                cost = decode_step_us(arguments.sequences, arguments.steps, depth, page_size, caching)
                print(
                    f"depth {depth}, pages of {page_size:3}, prefix cache {'on ' if caching else 'off'}: "
                    f"{cost:6.0f} us a step, {cost / arguments.sequences:.2f} us a row"
                )
    plain, speculating = (
        decode_step_us(arguments.sequences, arguments.steps, 1, 256, True, speculates) for speculates in (False, True)
    )
    print(
        f"with speculation that has left the batch: {speculating:.0f} us a step, {speculating / plain:.3f} of without"
    )
