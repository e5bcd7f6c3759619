"""What is asked of groups of processes and of one process, which must say the same."""

from pathlib import Path
from typing import Any

from mini_infer_engine import LLM, SamplingParams

PROMPTS = [
    [(position * step + 3) % 190 + 5 for position in range(length)] for step, length in ((31, 50), (7, 9), (13, 70))
]
SHARED = [*range(40, 80)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLING_PARAMS = [
    GREEDY,
    SamplingParams(temperature=1.1, top_p=0.9, seed=3, max_tokens=12, ignore_eos=True, repetition_penalty=1.2),
    SamplingParams(
        temperature=0.8, seed=4, max_tokens=10, logprobs=2, prompt_logprobs=1, min_tokens=4, logit_bias={9: 3.0}
    ),
]


def small_llm(folder: Path | str, **settings: Any) -> LLM:
    """On a CPU, without a tokenizer."""
    defaults = {"device": "cpu", "kv_cache_memory": 8_000_000, "max_num_seqs": 8, "skip_tokenizer_init": True}
    return LLM(str(folder), **(defaults | settings))


def results_of(llm: LLM, prompts: list[list[int]], sampling_params: Any) -> list[Any]:
    """Of each prompt the tokens, and how many of its own were cached."""
    made = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling_params, use_tqdm=False)
    return [(list(one.outputs[0].token_ids), one.num_cached_tokens) for one in made]
