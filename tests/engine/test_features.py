"""Each pair of features on a device: works, and then the text is what it should be, or is refused with a reason.

What docs/features.md tells is what is found here; `python -m tests.engine.test_features [PROCESSES]` writes it anew.
FEATURES_DEVICE=cuda tries the pairs on a GPU, of which the page tells what is otherwise than on a CPU.
"""

import atexit
import contextlib
import functools
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from mini_infer_engine import LLM, BeamSearchParams
from mini_infer_engine.core.speculation.controller import DraftController
from mini_infer_engine.model_path import DEMO_DIRECTORY
from mini_infer_engine.models.kv_spec import KV_QUANTIZATIONS
from mini_infer_engine.models.registry import model_class, read_config
from tests.support.features import FEATURES, Feature, sampling_of
from tests.support.prefill_apart import prefill_apart
from tests.support.tiny_models import save_head, save_tiny_model_with_text

DOCUMENT = Path(__file__).parents[2] / "docs" / "features.md"
DEVICE = os.environ.get("FEATURES_DEVICE", "cpu")
ON_GPU = "## On an NVIDIA GPU"
"""The section of what is otherwise there."""
PATTERN = [300 + (place * place) % 23 for place in range(24)]
PROMPTS = [{"prompt_token_ids": PATTERN + [400 + index] * (3 + index) + PATTERN[: 20 + index]} for index in range(3)]
"""With a shared beginning for the prefix cache and a repetition for look-up."""
LONG_PROMPTS = [{"prompt_token_ids": PATTERN + prompt["prompt_token_ids"] + PATTERN} for prompt in PROMPTS]
PAIRS = list(itertools.combinations_with_replacement(range(len(FEATURES)), 2))
GPUS = {pair: math.prod(FEATURES[index].gpus for index in set(pair)) for pair in PAIRS}
"""Of a pair: ranks of stages of engines multiply."""
TRIED = [
    pair
    for pair in PAIRS
    if DEVICE == "cpu"
    or (GPUS[pair] <= torch.cuda.device_count() and not any(FEATURES[index].prefill_apart for index in pair))
]


@dataclass(frozen=True)
class Outcome:
    """Of a pair: "works", "refused" with its reason, or "no pair" where the two exclude each other by what they are:
    two kinds of request, two models, two values of one setting."""

    word: str
    reason: str = ""


@functools.cache
def folder_of(feature: Feature | None) -> str:
    """The demo model, or a random one of the feature's architecture with the demo's tokenizer."""
    if feature is None or feature.architecture is None:
        return str(DEMO_DIRECTORY)
    folder = Path(tempfile.mkdtemp(prefix="features-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    architecture, shape = feature.architecture
    save_tiny_model_with_text(folder, architecture, **shape)
    return str(folder)


@functools.cache
def head_for(folder: str) -> str:
    """An untrained head for a model other than the demo's."""
    config = read_config(Path(folder))
    return str(save_head(Path(folder, "head"), config.hidden_size, config.num_layers))


def engine_of(features: list[Feature]) -> LLM:
    """An engine with the settings of all of these."""
    model = next((feature for feature in features if feature.architecture is not None), None)
    settings: dict[str, Any] = {
        "device": DEVICE,
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "seed": 0,
    }
    settings |= {"enable_prefix_caching": False, "kv_cache_memory": 40_000_000}
    for feature in features:
        settings |= feature.settings
    folder = folder_of(model)
    if model is not None and settings.get("speculative_method") == "head":
        settings["speculative_model"] = head_for(folder)
    if pages := settings.pop("pages", None):
        config = read_config(Path(folder))
        with torch.device("meta"):
            spec = model_class(config.architecture)(config).kv_spec(16, torch.float32)
        spec = replace(spec, quantization=KV_QUANTIZATIONS.get(settings.get("kv_cache_dtype", "")))
        settings["kv_cache_memory"] = (pages + 1) * spec.page_bytes
    return LLM(folder, **settings)


def run(features: list[Feature]) -> list[Any]:
    """Outputs of the prompts; a ValueError is a refusal."""
    with prefill_apart() if any(feature.prefill_apart for feature in features) else contextlib.nullcontext():
        return outputs_of(engine_of(features), features)


def outputs_of(llm: LLM, features: list[Feature]) -> list[Any]:
    """Of this engine."""
    kind = next((each.kind for each in features if each.kind != "generate"), "generate")
    guesses = any(feature.guesses for feature in features)
    prompts = LONG_PROMPTS if any(feature.is_long for feature in features) else PROMPTS
    if kind == "embed":
        return llm.embed(prompts, use_tqdm=False)
    if kind == "beam_search":
        return llm.beam_search(prompts, BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True))
    with patch.object(DraftController, "choose", lambda self, *_, **__: self.levels[-1]):
        outputs = llm.generate(prompts, sampling_of(features), use_tqdm=False)
        if any(feature.returns for feature in features) and llm.settings.data_parallel_size == 1:
            leave_device(llm)
            outputs = llm.generate(prompts, sampling_of(features), use_tqdm=False)
            assert loads_nothing(features) or all(output.cached_tokens_details.host for output in outputs)
    guesses = guesses and not any("kv_policy" in feature.sampling for feature in features)  # they have no draft tokens
    assert not guesses or llm.settings.data_parallel_size > 1 or llm._engine.stats().draft_tokens, "nothing was guessed"
    return outputs


def loads_nothing(features: list[Feature]) -> bool:
    """Whether prompts take no blocks of lower tiers with one of these, or do not come again."""
    fields = {"kv_policy", "prompt_logprobs"}
    return any(
        feature.prefill_apart or fields & feature.sampling.keys() or "data_parallel_size" in feature.settings
        for feature in features
    )


def leave_device(llm: LLM) -> None:
    """Has blocks in the lower tiers alone, from which they are loaded whatever that costs."""
    engine = llm._engine
    while engine.write_behind():
        engine._tiers.wait(1.0)
    engine.scheduler.kv_cache.reset_prefix_cache()
    engine._tiers._search.compute_tokens_per_s = engine._rate.tokens_per_s = 1.0


@functools.cache
def result_of(names: frozenset[str]) -> Any:
    """What comes out with these features."""
    return comparable(run([feature for feature in FEATURES if feature.name in names]))


def comparable(outputs: list[Any]) -> Any:
    """Token ids, or embeddings."""
    if hasattr(outputs[0], "sequences"):
        return [[sequence.tokens for sequence in output.sequences] for output in outputs]
    if not hasattr(outputs[0].outputs, "embedding"):
        return [list(output.outputs[0].token_ids) for output in outputs]
    return torch.tensor([output.outputs.embedding for output in outputs])


def outcome_of(pair: list[Feature]) -> Outcome:
    """Try it. An assertion: it is neither refused nor what it should be."""
    is_request = [feature.kind != "generate" or bool(feature.sampling) for feature in pair]
    kinds = {feature.kind for feature in pair if feature.kind != "generate"}
    if len(pair) == 2 and ((all(is_request) and kinds) or all(feature.architecture for feature in pair)):
        return Outcome("no pair")
    one, other = pair[0].settings, pair[-1].settings
    if any(one[name] != other[name] for name in one.keys() & other.keys()):
        return Outcome("no pair")
    try:
        outputs = run(pair)
    except ValueError as error:
        return Outcome("refused", re.sub(r"^LLM\('.*?'\): ", "", str(error)))  # without the folder
    if not kinds:
        assert all(feature.shows(output) for feature in pair for output in outputs), "a feature does not show"
    changing = frozenset(
        feature.name
        for feature in pair
        if not (feature.keeps_text or (feature.returns and loads_nothing(pair))) or feature.kind != "generate"
    )
    expected, made = result_of(changing), comparable(outputs)
    if isinstance(made, torch.Tensor):
        assert torch.allclose(made, expected, atol=1e-4)
    else:
        assert made == expected, "another text"
    return Outcome("works")


def features_of(pair: tuple[int, int]) -> list[Feature]:
    """One feature by itself, or two."""
    return [FEATURES[index] for index in dict.fromkeys(pair)]


MARKS = {"works": "yes", "refused": "no", "no pair": ""}


def document(outcomes: dict[tuple[int, int], Outcome]) -> Iterator[str]:
    """Lines of docs/features.md up to what is told of GPUs, by what was found on a CPU."""
    yield "# What can be combined"
    yield ""
    where = "[test_features.py](../tests/engine/test_features.py)"
    yield f"Each pair is tried by {where}, which also wrote this page, here on a CPU:"
    yield "`yes`, and then the text is that of the engine without what should not change it; `no`, it is refused with a"
    yield "reason, which stands below; empty, the two are no pair. A feature's line is in"
    yield "[features.py](../tests/support/features.py)."
    yield ""
    numbers = range(1, len(FEATURES) + 1)
    yield "| | | " + " | ".join(map(str, numbers)) + " |"
    yield "|---|---|" + "---|" * len(FEATURES)
    for row, feature in enumerate(FEATURES):
        cells = [MARKS[outcomes[column, row].word] if column <= row else "" for column in range(len(FEATURES))]
        yield f"| {row + 1} | {feature.name} | " + " | ".join(cells) + " |"
    refused = [(pair, outcome) for pair, outcome in outcomes.items() if outcome.word == "refused"]
    if refused:
        yield ""
        yield "Refused:"
        yield ""
        for pair, outcome in refused:
            yield f"- {names_of(pair)}: {outcome.reason}"


def document_of_gpu(outcomes: dict[tuple[int, int], Outcome]) -> Iterator[str]:
    """Its last section, by what was found on a GPU."""
    on_cpu = cells()
    yield ON_GPU
    yield ""
    alike = {pair for pair, outcome in outcomes.items() if MARKS[outcome.word] == on_cpu[pair]}
    gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    yield f"{len(alike)} of the pairs were tried there ({gpus}), and come out alike."
    tried = {index for pair in outcomes for index in pair}
    if untried := [feature.name for index, feature in enumerate(FEATURES) if index not in tried]:
        yield f"Not tried there: {', '.join(untried)}."
    for pair in [pair for pair in outcomes if pair not in alike]:
        yield f"- {names_of(pair)}: `{MARKS[outcomes[pair].word]}` {outcomes[pair].reason}".rstrip()


def cells() -> dict[tuple[int, int], str]:
    """The cells of the page."""
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| ") and line[2].isdigit()]
    texts = [[cell.strip() for cell in row.strip("|").split("|")][2:] for row in rows]
    return {pair: texts[pair[1]][pair[0]] for pair in PAIRS}


def reported() -> dict[tuple[int, int], str]:
    """What the page tells of each pair on this device."""
    found = cells()
    if DEVICE != "cpu":
        section = DOCUMENT.read_text().partition(ON_GPU)[2]
        by_names = {names_of(pair): pair for pair in PAIRS}
        for names, mark in re.findall(r"^- (.*?): `(.*?)`", section, re.MULTILINE):
            found[by_names[names]] = mark
    return found


@pytest.mark.features
@pytest.mark.parametrize("pair", TRIED, ids=lambda pair: "+".join(feature.name for feature in features_of(pair)))
def test_a_pair_of_features_behaves_as_the_page_says(pair: tuple[int, int]) -> None:
    assert MARKS[outcome_of(features_of(pair)).word] == reported()[pair]


def test_two_values_of_one_setting_are_no_pair() -> None:
    weights = [feature for feature in FEATURES if "quantization" in feature.settings]
    assert len(weights) > 2
    assert all(outcome_of(list(pair)).word == "no pair" for pair in itertools.combinations(weights, 2))


def test_the_features_page_has_a_line_for_each_feature() -> None:
    lines = DOCUMENT.read_text().splitlines()
    assert [line.split("|")[2].strip() for line in lines if line.startswith("| ") and line[2].isdigit()] == [
        feature.name for feature in FEATURES
    ]


def tried(pair: tuple[int, int]) -> Outcome:
    """With the pair's name where it fails: all are tried, so that one look tells everything."""
    try:
        outcome = outcome_of(features_of(pair))
        if DEVICE != "cpu":
            torch.cuda.synchronize()  # a fault of a kernel is this pair's
        return outcome
    except Exception as error:
        return Outcome("fails", f"{names_of(pair)} {type(error).__name__} {str(error)[:300]}")


def names_of(pair: tuple[int, int]) -> str:
    """For people."""
    return " with ".join(feature.name for feature in features_of(pair))


def work() -> None:
    """Try the pairs that stdin names, and tell what comes of each, and whether another process is to go on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    for line in sys.stdin:
        outcome = tried(tuple(json.loads(line)))
        is_over = outcome.word == "fails" and "CUDA" in outcome.reason  # no kernel runs here any more
        print(json.dumps([outcome.word, outcome.reason, is_over]), file=answers, flush=True)


class Worker:
    """A process that tries pairs, and may die of one. FEATURES_UNDER: words before its command, of a debugger."""

    def __init__(self) -> None:
        command = [*os.environ.get("FEATURES_UNDER", "").split(), sys.executable, "-m", "tests.engine.test_features"]
        self._process = subprocess.Popen(
            [*command, "--worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=DOCUMENT.parents[1]
        )

    def ask(self, pair: tuple[int, int]) -> tuple[Outcome, bool]:
        """What comes of a pair, and whether the process is over."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(pair), file=process.stdin, flush=True)
        if answer := process.stdout.readline():
            word, reason, is_over = json.loads(answer)
            return Outcome(word, reason), is_over
        return Outcome("fails", f"{names_of(pair)}: its process ended with {process.wait()}"), True

    def close(self) -> None:
        """It has nothing more to do."""
        self._process.communicate("")


def try_all(pairs: list[tuple[int, int]], processes: int, pairs_each: int) -> dict[tuple[int, int], Outcome]:
    """In so many processes at a time, of which each tries at most so many pairs."""
    found, waiting = dict[tuple[int, int], Outcome](), deque(pairs)

    def lane() -> None:
        worker, left = None, 0
        while True:
            try:
                pair = waiting.popleft()
            except IndexError:
                break
            if worker is None:
                worker, left = Worker(), pairs_each
            found[pair], is_over = worker.ask(pair)
            left -= 1
            if is_over or not left:
                worker.close()
                worker = None
        if worker is not None:
            worker.close()

    with ThreadPoolExecutor(processes) as lanes:
        for done in [lanes.submit(lane) for _ in range(processes)]:
            done.result()
    return found


_GROUPS = 6
"""Of GPUs at a time: ranks that wait for each other need their turns on all GPUs at once."""


def main() -> int:
    """Try all pairs, in so many processes as are named, and write the page."""
    if sys.argv[1:] == ["--worker"]:
        work()
        return 0
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    # A process has one group of GPUs in its life.
    apart = [pair for pair in TRIED if DEVICE != "cpu" and GPUS[pair] > 1]
    beside = [pair for pair in TRIED if pair not in apart]
    found = try_all(beside, processes, len(beside)) | try_all(apart, min(processes, _GROUPS), 1)
    found = {pair: found[pair] for pair in TRIED}
    failed = [outcome.reason for outcome in found.values() if outcome.word == "fails"]
    print(*failed, sep="\n")
    if not failed:
        on_cpu, heading, on_gpu = DOCUMENT.read_text().partition(ON_GPU)
        if DEVICE == "cpu":
            on_cpu = "\n".join(document(found))
        else:
            heading, on_gpu = "\n".join(document_of_gpu(found)), ""
        DOCUMENT.write_text(f"{on_cpu.strip()}\n\n{heading}{on_gpu}".strip() + "\n")
    return len(failed)


if __name__ == "__main__":
    raise SystemExit(main())
