"""Each pair of features on a CPU: works, and then the text is what it should be, or is refused with a reason.

What docs/features.md tells is what is found here; `python -m tests.engine.test_features` writes it anew.
"""

import atexit
import functools
import itertools
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer_engine import LLM, BeamSearchParams
from mini_infer_engine.config.model_path import DEMO_DIRECTORY
from mini_infer_engine.models.kv_spec import KV_QUANTIZATIONS
from mini_infer_engine.models.registry import model_class, read_config
from tests.support.features import FEATURES, Feature, sampling_of
from tests.support.tiny_models import save_tiny_model_with_text

DOCUMENT = Path(__file__).parents[2] / "docs" / "features.md"
PATTERN = [300 + (place * place) % 23 for place in range(24)]
PROMPTS = [{"prompt_token_ids": PATTERN + [400 + index] * (3 + index) + PATTERN[: 20 + index]} for index in range(3)]
"""With a shared beginning for the prefix cache and a repetition for look-up."""
PAIRS = list(itertools.combinations_with_replacement(range(len(FEATURES)), 2))


@dataclass(frozen=True)
class Outcome:
    """Of a pair: "works", "refused" with its reason, or "no pair" where the two exclude each other by what they are."""

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


def engine_of(features: list[Feature]) -> LLM:
    """An engine with the settings of all of these."""
    model = next((feature for feature in features if feature.architecture is not None), None)
    settings: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 4, "seed": 0}
    settings |= {"enable_prefix_caching": False, "kv_cache_memory": 40_000_000}
    for feature in features:
        settings |= feature.settings
    folder = folder_of(model)
    if pages := settings.pop("pages", None):
        config = read_config(Path(folder))
        with torch.device("meta"):
            spec = model_class(config.architecture)(config).kv_spec(16, torch.float32)
        spec = replace(spec, quantization=KV_QUANTIZATIONS.get(settings.get("kv_cache_dtype", "")))
        settings["kv_cache_memory"] = (pages + 1) * spec.page_bytes
    return LLM(folder, **settings)


def run(features: list[Feature]) -> list[Any]:
    """Outputs of the prompts; a ValueError is a refusal."""
    llm, kind = engine_of(features), next((each.kind for each in features if each.kind != "generate"), "generate")
    if kind == "embed":
        return llm.embed(PROMPTS, use_tqdm=False)
    if kind == "beam_search":
        return llm.beam_search(PROMPTS, BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True))
    return llm.generate(PROMPTS, sampling_of(features), use_tqdm=False)


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
    try:
        outputs = run(pair)
    except ValueError as error:
        return Outcome("refused", re.sub(r"^LLM\('.*?'\): ", "", str(error)))  # without the folder
    if not kinds:
        assert all(feature.shows(output) for feature in pair for output in outputs), "a feature does not show"
    changing = frozenset(feature.name for feature in pair if not feature.keeps_text or feature.kind != "generate")
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
    """Lines of docs/features.md."""
    yield "# What can be combined"
    yield ""
    where = "[test_features.py](../tests/engine/test_features.py)"
    yield f"Each pair is tried on a CPU by {where}, which also wrote this page:"
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
            names = " with ".join(feature.name for feature in features_of(pair))
            yield f"- {names}: {outcome.reason}"


def told() -> dict[tuple[int, int], str]:
    """The cells of the page."""
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| ") and line[2].isdigit()]
    cells = [[cell.strip() for cell in row.strip("|").split("|")][2:] for row in rows]
    return {pair: cells[pair[1]][pair[0]] for pair in PAIRS}


@pytest.mark.features
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "+".join(feature.name for feature in features_of(pair)))
def test_a_pair_is_as_the_page_tells(pair: tuple[int, int]) -> None:
    assert MARKS[outcome_of(features_of(pair)).word] == told()[pair]


def test_the_page_has_a_line_for_each_feature() -> None:
    lines = DOCUMENT.read_text().splitlines()
    assert [line.split("|")[2].strip() for line in lines if line.startswith("| ") and line[2].isdigit()] == [
        feature.name for feature in FEATURES
    ]


if __name__ == "__main__":
    found = {}
    for each in PAIRS:
        try:
            found[each] = outcome_of(features_of(each))
        except Exception as error:  # all of them, so that one look tells everything
            print([feature.name for feature in features_of(each)], type(error).__name__, str(error)[:300])
    DOCUMENT.write_text("\n".join(document(found)) + "\n")
