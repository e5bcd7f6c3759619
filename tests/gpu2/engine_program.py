"""An engine with these settings in a process of its own: what it says, or how it ends when a rank is killed."""

import json
import os
import signal
import sys
import time
from typing import Any

from mini_infer_engine import LLM, SamplingParams
from mini_infer_engine.core.batch import RunnerLostError
from mini_infer_engine.distributed.parallel_runner import ParallelRunner

PROMPTS = ["def main():", "The class", "import os\n", "# Sort a list of numbers\n" * 30, "for i in"]
LONG_PROMPTS = [
    f"# Part {number}\n" + "def sort(numbers):\n    return sorted(numbers)\n" * functions
    for number, functions in enumerate((290, 275, 285, 270, 290))
]
"""Of 3,500 to 3,800 tokens: passes that compute several, or the rest of some beside decode rows."""
SAMPLING_PARAMS = [
    SamplingParams(temperature=0, max_tokens=40),
    SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=40),
    SamplingParams(temperature=0, max_tokens=40, repetition_penalty=1.2),
    SamplingParams(temperature=0, max_tokens=20, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1.0, seed=8, min_tokens=10, max_tokens=40),
]


def overlapped_sums(llm: LLM) -> int:
    """How many of them this rank has begun."""
    runner: Any = getattr(llm._engine, "_runner", None)
    peers = runner.local.worker.collectives.peers if isinstance(runner, ParallelRunner) else None
    return 0 if peers is None else peers._overlapped._number


def main() -> None:
    """Run as `python -m tests.gpu2.engine_program JSON`."""
    question: dict[str, Any] = json.loads(sys.argv[1])
    # A cache of given size: others that start on the same GPU meanwhile take memory, too.
    settings = {"kv_cache_memory": 1 << 30, "max_num_seqs": 16} | question["settings"]
    llm = LLM(question.get("model", "demo"), **settings)
    prompts = LONG_PROMPTS if question.get("long") else PROMPTS
    before = overlapped_sums(llm)
    texts = [[one.outputs[0].text for one in llm.generate(prompts, SAMPLING_PARAMS, use_tqdm=False)] for _ in range(2)]
    found: dict[str, Any] = {"texts": texts, "overlapped": overlapped_sums(llm) - before}
    if number := question.get("signal"):
        runner = llm._engine._runner
        assert isinstance(runner, ParallelRunner)
        os.kill(runner.ranks.processes[1].pid, signal.Signals(number))
        begin_s = time.monotonic()
        try:
            llm.generate(prompts[:4], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True), use_tqdm=False)
        except RunnerLostError as error:
            found["reason"] = str(error)
        found["took_s"] = time.monotonic() - begin_s
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # the group may be gone, and NCCL would wait for it


if __name__ == "__main__":
    main()
