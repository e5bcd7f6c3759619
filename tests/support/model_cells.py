"""Names the test behind each cell of docs/models.md: a function for each column, and its case for an architecture."""

import importlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mini_infer_engine.config.model.architectures import HYBRIDS
from mini_infer_engine.models.support import ModelSupport, supported_models
from tests.engine.distributed.test_sharded_models import CHOSEN
from tests.engine.distributed.test_sharded_models import HYBRIDS as RECURRENT
from tests.engine.gguf import test_gguf
from tests.engine.models.test_models import VARIANTS
from tests.support.gguf_experts_files import FORMS

ROOT = Path(__file__).parents[2]
_GPU = "tests/gpu/test_logits.py"
_IN_GGUF = {"gemma3": "gemma3_text", "qwen3moe": "qwen3_moe"} | {name: form[0] for name, form in FORMS.items()}
"""transformers' model_type of the architectures in test_gguf.py that have another name there."""


@dataclass(frozen=True)
class Column:
    """The test of one column, for models of one implementation."""

    path: str
    function: str
    case: str = "{}"
    """The id of its case; braces stand for the model's name there."""


@dataclass(frozen=True)
class Cell:
    """One case of a test."""

    column: Column
    name: str
    """The model's name in the test."""

    @property
    def case(self) -> str:
        """The id in brackets."""
        return self.column.case.format(self.name)


_MODELS = "tests/engine/models"
_ELSEWHERE = ("quantised",)
"""Columns in which hybrids have tests of their own (test_quantized_hybrids.py)."""
CELLS: dict[str, Column] = {
    "native CPU": Column(
        f"{_MODELS}/test_models.py", "test_logits_equal_transformers_whole_chunked_and_token_by_token"
    ),
    "native GPU": Column(_GPU, "test_fp32_logits_whole_chunked_and_token_by_token"),
    "native TP": Column(
        "tests/engine/distributed/test_sharded_models.py", "test_tensor_parallel_logits_equal_one_process", "{}-2"
    ),
    "hybrids TP": Column(
        "tests/engine/distributed/test_sharded_models.py",
        "test_tensor_parallel_logits_equal_one_process_when_layers_have_a_recurrent_state",
    ),
    "native quantised": Column(
        f"{_MODELS}/test_model_cells.py", "test_logits_equal_those_of_rounded_weights_when_a_model_is_quantised"
    ),
    "native GGUF": Column(
        "tests/engine/gguf/test_gguf.py", "test_gguf_logits_equal_transformers_for_each_architecture"
    ),
    **{
        f"native {method}": Column(
            f"{_MODELS}/test_model_cells.py",
            "test_text_is_that_without_guesses_when_a_model_guesses",
            f"{{}}-{method}",
        )
        for method in ("ngram", "draft_model", "head", "eagle3", "mtp")
    },
    "native transformers": Column(
        f"{_MODELS}/test_model_cells.py", "test_both_implementations_make_one_text_when_a_file_of_ours_exists"
    ),
    "transformers CPU": Column(
        f"{_MODELS}/test_transformers_backend.py", "test_text_of_every_model_is_that_of_generate"
    ),
    "transformers GPU": Column(
        "tests/gpu/test_transformers_models.py", "test_text_is_that_of_generate_when_a_gpu_runs_transformers_code"
    ),
    "transformers TP": Column(
        f"{_MODELS}/test_transformers_sharding.py",
        "test_text_of_every_model_is_that_of_one_process_when_ranks_share_it",
    ),
    **{
        f"transformers {method}": Column(
            f"{_MODELS}/test_model_cells.py",
            "test_text_is_that_without_guesses_when_a_model_of_transformers_guesses",
            f"{{}}-{method}",
        )
        for method in ("ngram", "draft_model")
    },
    "encoders CPU": Column(
        "tests/engine/pooling/test_encoders.py",
        "test_embeddings_equal_transformers_when_an_encoder_pools_its_first_token",
    ),
    "encoders GPU": Column(
        "tests/gpu/test_encoders.py", "test_embeddings_equal_transformers_when_a_gpu_pools_the_first_token"
    ),
}
"""By implementation and column."""


def _first_cases(model_types: Mapping[str, str]) -> dict[str, str]:
    """Returns the first case of each architecture, from cases by model_type."""
    first: dict[str, str] = {}
    for case, model_type in model_types.items():
        first.setdefault(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type], case)
    return first


CASES = _first_cases({name: model_type for name, (model_type, _) in VARIANTS.items()})
"""The first variant of each architecture of ours in test_models.py."""
_NATIVE_CASES = {
    "TP": _first_cases({name: VARIANTS[name][0] for name in [*CHOSEN, *RECURRENT]}),
    "GGUF": _first_cases(
        {
            name: _IN_GGUF.get(model_type, model_type)
            for name, (model_type, _) in (test_gguf.ARCHITECTURES | test_gguf.SPARSE).items()
        }
    )
    | {"MistralForCausalLM": "llama"},
}
"""The first cases of tests that have others; GGUF calls Mistral's files llama."""


def claims(model: ModelSupport, column: str) -> bool:
    """Returns True if the model is said to have what a column is of."""
    said = {
        "CPU": model.cpu,
        "GPU": True,
        "TP": model.tensor_parallel,
        "quantised": model.quantised,
        "GGUF": model.gguf,
        "transformers": model.through_transformers,
    } | dict.fromkeys(model.speculation, True)
    return said.get(column, False)


def cell(model: ModelSupport, column: str) -> Cell | None:
    """Returns the test of a column for a model, or None if the model does not claim it."""
    kind = model.implementation if model.generates else "encoders"
    is_hybrid = model.architecture in HYBRIDS
    test = CELLS.get(f"{'hybrids' if is_hybrid and column == 'TP' else kind} {column}")
    if test is None or model.reads_images or not claims(model, column) or (is_hybrid and column in _ELSEWHERE):
        return None
    if kind != "native":
        return Cell(test, model.model_type)
    return Cell(test, _NATIVE_CASES.get(column, CASES)[model.architecture])


def _is_of(model: ModelSupport, kind: str, column: str) -> bool:
    if column == "TP" and model.architecture in HYBRIDS:
        return kind == "hybrids"
    return (model.implementation if model.generates else "encoders") == kind


def cells_of(key: str) -> dict[str, Cell]:
    """Returns the cells of a key of `CELLS` by architecture."""
    kind, _, column = key.partition(" ")
    models = [each for each in supported_models() if _is_of(each, kind, column)]
    found = {model.architecture: cell(model, column) for model in models}
    return {name: each for name, each in found.items() if each is not None}


def case_exists(found: Cell) -> bool:
    """True if pytest would collect the case."""
    if found.column.path.startswith("tests/gpu/"):  # they cannot be imported without Triton
        cases = VARIANTS if found.column.path == _GPU else {each.model_type for each in supported_models()}
        return found.case in cases and f"def {found.column.function}(" in (ROOT / found.column.path).read_text()
    return found.case in _cases_of(found.column.path, found.column.function)


@cache
def _cases_of(path: str, function: str) -> frozenset[str]:
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    marks = [mark for mark in getattr(getattr(module, function), "pytestmark", []) if mark.name == "parametrize"]
    return frozenset("-".join(ids) for ids in itertools.product(*(_ids(mark.args[1]) for mark in marks)))


def _ids(values: Any) -> list[str]:
    """Returns the ids of a parametrisation by strings and numbers."""
    plain = [getattr(value, "values", value) if not isinstance(value, dict) else value for value in values]
    return ["-".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in plain]
