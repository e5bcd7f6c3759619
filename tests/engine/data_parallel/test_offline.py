"""`LLM(data_parallel_size=2)`: the same texts as one engine's, and the end of one of them."""

import os
import signal
import subprocess

import pytest

from mini_infer_engine import LLM, SamplingParams
from mini_infer_engine.core.batch import RunnerLostError
from mini_infer_engine.data_parallel.offline import OfflineEngines

PROMPTS = [f"{number} times the same, and more" for number in range(20)]


def children() -> set[int]:
    found = subprocess.run(["ps", "-o", "pid=,comm=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    return {int(line.split()[0]) for line in found.stdout.splitlines() if "python" in line}


def test_data_parallel_llm_texts_equal_one_engines() -> None:
    before = children()
    sampling_params = [SamplingParams(max_tokens=4 + number, temperature=0, stop=["e"]) for number in range(20)]
    alone, several = LLM("dry"), LLM("dry", data_parallel_size=2)
    assert several.model_info.num_pages == 2 * alone.model_info.num_pages
    texts = [
        [one.outputs[0].text for one in llm.generate(PROMPTS, sampling_params, use_tqdm=False)]
        for llm in (alone, several)
    ]
    assert texts[0] == texts[1]
    (again,) = several.generate([PROMPTS[3]], sampling_params[3], use_tqdm=False)
    assert again.num_cached_tokens == 16, "it went where its prompt was"
    with pytest.raises(ValueError, match="prompt 0"):
        several.generate([""], use_tqdm=False)
    del several
    assert children() <= before  # other tests' children may have ended meanwhile


def test_waiting_calls_raise_when_an_engine_ends() -> None:
    llm = LLM("dry", data_parallel_size=2)
    engines = llm._engine
    assert isinstance(engines, OfflineEngines)
    os.kill(engines._cores[1].pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(RunnerLostError, match="engine 1"):
            llm.generate(PROMPTS, SamplingParams(max_tokens=5), use_tqdm=False)
