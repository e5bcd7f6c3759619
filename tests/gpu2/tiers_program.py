"""An engine with these settings in a process of its own: its texts where blocks come back from main memory, with the
passes behind them.
"""

import json
import os
import sys
from itertools import count
from typing import Any

from mini_infer_engine import LLM
from mini_infer_engine.core.kv_tiers.tier_memory import PageMove
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.distributed.step_messages import CopyBlocks

PROMPTS = [[(place * 7 + shift * 13) % 190 + 5 for place in range(length)] for shift, length in enumerate((700, 401))]
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)


def scored(llm: LLM, prompt: list[int]) -> list[float]:
    """The tokens that follow a prompt, and the log probability of each, which wrong blocks change first."""
    llm._engine.add(Request(request_id="only", prompt_token_ids=prompt, sampling=PARAMS))
    made = list[float]()
    while llm._engine.has_work:
        for output in llm._engine.step():
            assert output.finish_reason != "error", output.error
            made += [*output.token_ids, *(each.logprob for each in output.logprobs)]
    return made


def load_late(memory: Any) -> list[int]:
    """Has other blocks come to the pages of each load that goes with a pass first, on all ranks. Returns a list that
    gets the number of pages of each.
    """
    send, tickets, followed = memory._send, count(1 << 40), list[int]()

    def send_late(command: CopyBlocks) -> None:
        if command.way == "load_layerwise":
            followed.append(len(command.moves))
            wrong = [PageMove(command.moves[0].source, move.target) for move in command.moves] * 40
            send(CopyBlocks(next(tickets), "load", wrong))
            ticket = next(tickets)
            memory._parts[ticket] = {}
            memory._local.load(ticket, wrong)
        send(command)

    memory._send = send_late
    return followed


def main() -> None:
    """Run as `python -m tests.gpu2.tiers_program JSON`."""
    settings: dict[str, Any] = json.loads(sys.argv[1])["settings"]
    common = {"kv_cache_memory": 1 << 28, "max_num_seqs": 4, "page_size": 16, "dtype": "float32"}
    llm = LLM("demo", **common | settings)
    found: dict[str, Any] = {"texts": [[scored(llm, prompt) for prompt in PROMPTS]]}
    engine: Any = llm._engine
    if "kv_host_memory" in settings:
        engine._rate.committed = lambda step, now_s: None
        engine._tiers._search.compute_tokens_per_s = 1.0  # it is to load, whatever that costs
        memory = engine._runner.host_memory
        memory.least_load_s, followed = 0.0, load_late(memory)
        for _ in range(3):
            while engine.write_behind():
                engine._tiers.wait(1.0)
            while engine._tiers.are_copying:
                engine._tiers.wait(1.0)
                engine._tiers.take(0.0, 0.0)
            engine.scheduler.kv_cache.reset_prefix_cache()
            found["texts"].append([scored(llm, prompt) for prompt in PROMPTS])
        stats = engine.stats().kv_tiers.tiers["host"]
        found |= {"followed": followed, "hit": stats.hit_tokens, "wrong": stats.mismatches + stats.errors}
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
