"""Measures one scheme: loads its model as serving does, reads texts, answers questions, times it, and frees it.

The first scheme's log probabilities stay in main memory, in fp16; the others are compared with them.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.runtime.model_runner import ModelRunner, load_runner
from mini_infer_engine.tools.compare.texts import Questions, Text

_TIMED_PROMPT = 128
_TIMED_OUTPUT = 17
_TIMED_BATCH = 8
_TRIES = 3


@dataclass(slots=True)
class Baseline:
    """Log probabilities of the first scheme, [counted tokens, vocabulary] fp16 for each text."""

    texts: list[Tensor] = field(default_factory=list)


def measure(
    settings: EngineSettings, texts: list[Text], questions: list[Questions], decode: Callable[[list[int]], str],
    baseline: Baseline,
) -> dict[str, float]:  # fmt: skip
    """Returns figures by name, and fills an empty baseline. Raises ValueError for a bad model or bad settings."""
    begin = time.perf_counter()
    runner = load_runner(settings)
    figures = {"load s": time.perf_counter() - begin}
    figures |= precision(runner, texts, baseline)
    for question in questions:
        answers = _generate(settings, runner, question.prompts, question.max_tokens, ends=True)
        figures[question.figure] = question.judge([decode(answer) for answer in answers])
    figures["weights MB"] = runner.worker.weight_bytes / 1e6
    figures["KV bytes/token"] = runner.pool.spec.page_bytes / runner.page_size
    figures |= speed(settings, runner)
    del runner
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return figures


def precision(runner: ModelRunner, texts: list[Text], baseline: Baseline) -> dict[str, float]:
    """Returns the texts' perplexity, the share of equal first choices, and the mean KL in nats from the baseline."""
    fills = not baseline.texts
    surprise = agreed = divergence = 0.0
    counted = 0
    for index, text in enumerate(texts):
        pages = list(range(-(-len(text.tokens) // runner.page_size)))
        logits = runner.logits(Batch([Row(0, 0, len(text.tokens), text.tokens, pages, None)], 0))
        counts = torch.tensor(text.counts, device=logits.device)
        scores = logits[:-1][counts].float().log_softmax(-1).cpu()
        targets = torch.tensor(text.tokens[1:])[counts.cpu()]
        surprise -= float(scores.gather(1, targets[:, None]).sum())
        counted += len(targets)
        if fills:
            baseline.texts.append(scores.half())
        truth = baseline.texts[index].float()
        agreed += float((scores.half().argmax(-1) == truth.argmax(-1)).sum())
        divergence += float((truth.exp() * (truth - scores)).sum())
    return {
        "perplexity": float(torch.tensor(surprise / counted).exp()),
        "top-1 agreement": agreed / counted,
        "KL nats": max(0.0, divergence / counted),
    }


def speed(settings: EngineSettings, runner: ModelRunner) -> dict[str, float]:
    """Returns the time to first token, the inter-token latency, and a batch's tokens a second; medians of tries."""
    length = min(_TIMED_PROMPT, runner.max_model_len - _TIMED_OUTPUT - 1)
    firsts, betweens, rates = [], [], []
    for attempt in range(_TRIES + 1):
        prompts = [
            [(7 * place + 131 * row + 977 * attempt) % (runner.config.vocab_size - 10) + 5 for place in range(length)]
            for row in range(_TIMED_BATCH + 2)
        ]
        batch = min(_TIMED_BATCH, settings.max_num_seqs)
        first_s = _seconds(settings, runner, prompts[:1], 1)
        whole_s = _seconds(settings, runner, prompts[1:2], _TIMED_OUTPUT)
        batch_s = _seconds(settings, runner, prompts[2 : 2 + batch], _TIMED_OUTPUT)
        if attempt:  # the first one warms up
            firsts.append(first_s * 1e3)
            betweens.append(max(0.0, whole_s - first_s) / (_TIMED_OUTPUT - 1) * 1e3)
            rates.append(batch * _TIMED_OUTPUT / batch_s)
    middle = _TRIES // 2
    return {
        "TTFT ms": sorted(firsts)[middle],
        "inter-token ms": sorted(betweens)[middle],
        "tokens/s": sorted(rates)[middle],
    }


def _seconds(settings: EngineSettings, runner: ModelRunner, prompts: list[list[int]], count: int) -> float:
    begin = time.perf_counter()
    _generate(settings, runner, prompts, count, ends=False)
    return time.perf_counter() - begin


def _generate(
    settings: EngineSettings, runner: ModelRunner, prompts: list[list[int]], count: int, *, ends: bool
) -> list[list[int]]:
    """Returns greedy answers to all prompts, batched in an engine as in serving. With `ends` the model ends them."""
    eos = runner.config.eos_token_ids if ends else ()
    engine = Engine(runner.settings, runner, eos, runner.max_model_len, settings.model, record_events=False)
    made: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        limit = min(count, runner.max_model_len - len(prompt) - 1)
        sampling = SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=not ends)
        engine.add(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling, noise_seed=0))
    while engine.has_work:
        for output in engine.step():
            made[output.request_id] += output.token_ids
    return list(made.values())
