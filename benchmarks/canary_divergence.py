"""Measures the divergence to expect of an edit, engine by engine: the limit of `rollout.canary.analysis.answers`.

The base answers questions greedily; every variant then scores these answers as a canary's replay does. Printed is the
mean absolute difference of log probabilities, in nats a token, over all answers and of the worst one.
"""

import gc
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.canary_faults.models import BASE, QUESTIONS, make_models
from benchmarks.common.report import make_parser, save
from mini_infer_engine import LLM, SamplingParams

MORE_QUESTIONS = (
    "Write a function that adds two numbers.",
    "What is a generator?",
    "How do I sort a dictionary by value?",
    "What does with open(path) as file do?",
    "Explain list comprehensions.",
)
TOKENS = 64


@dataclass(frozen=True)
class Variant:
    """An engine to compare with the base."""

    name: str
    is_good: bool
    model: str = BASE
    options: dict[str, Any] = field(default_factory=dict)


VARIANTS = (
    Variant("the same again", True),
    Variant("float32", True, options={"dtype": "float32"}),
    Variant("without a prefix cache, 64 tokens a pass", True, options={"max_num_batched_tokens": 64}),
    Variant("KV cache in fp8", True, options={"kv_cache_dtype": "fp8"}),
    Variant("weights in int8", True, options={"quantization": "int8"}),
    Variant("weights in fp8", True, options={"quantization": "fp8"}),
    Variant("weights in int4, by GPTQ", True, options={"quantization": "int4"}),
    Variant("wrong chat template", False, model="template"),
    Variant("weights rounded to three bits with one scale", False, model="quantised"),
)


def conversations() -> list[list[dict[str, str]]]:
    """Returns a conversation for each question."""
    return [[{"role": "user", "content": question}] for question in (*QUESTIONS, *MORE_QUESTIONS)]


def prompts_of(llm: Any) -> list[list[int]]:
    """Returns the prompts' token ids, as this engine renders them."""
    outputs = llm.chat(conversations(), SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
    return [list(output.prompt_token_ids) for output in outputs]


def scores(llm: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[list[float]]:
    """Returns the log probabilities of each answer's tokens after its prompt."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    asked = [{"prompt_token_ids": [*prompt, *answer]} for prompt, answer in zip(prompts, answers, strict=True)]
    found = []
    for answer, output in zip(answers, llm.generate(asked, params, use_tqdm=False), strict=True):
        positions = output.prompt_logprobs[-len(answer) :]
        found.append([position[token].logprob for token, position in zip(answer, positions, strict=True)])
    return found


def main() -> int:
    """Measures all variants."""
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    options = parser.parse_args()
    common = {"device": options.device, "max_model_len": 2048, "kv_cache_memory": 256 << 20, "enforce_eager": True}
    found: dict[str, dict[str, float | bool]] = {}
    folder = Path(tempfile.mkdtemp())
    try:
        make_models(folder)
        base = LLM(str(folder / BASE), **common)
        prompts = prompts_of(base)
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = [list(output.outputs[0].token_ids) for output in base.generate(asked, params, use_tqdm=False)]
        before = scores(base, prompts, answers)
        del base
        for variant in VARIANTS[-2:] if options.smoke else VARIANTS:
            gc.collect()
            try:
                llm = LLM(str(folder / variant.model), **common | variant.options)
            except ValueError as error:
                print(f"{variant.name:<48} not here: {str(error)[:100]}", flush=True)
                continue
            after = scores(llm, prompts_of(llm), answers)
            del llm
            each = [
                mean(abs(one - other) for one, other in zip(*pair, strict=True))
                for pair in zip(before, after, strict=True)
            ]
            found[variant.name] = {"mean": round(mean(each), 4), "worst": round(max(each), 4), "good": variant.is_good}
            print(f"{variant.name:<48} {mean(each):8.4f} {max(each):8.4f}", flush=True)
            save(options.out, found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
