"""What docs/models.md says of each architecture beside its logits: weights rounded at load, guessed tokens, and the
code of transformers in place of a file of ours.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.architectures import HYBRIDS
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.speculation.controller import DraftController
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.models.support import supported_models
from mini_infer_engine.runtime.recurrent.limits import check_recurrent
from tests.engine.models.test_models import VARIANTS
from tests.engine.models.test_quantization_on_load import rounded_by_loops
from tests.engine.models.test_transformers_backend import PROMPTS, generate, make_engine
from tests.support.hidden_drafts import eagle3_config, eagle3_tensors, save_eagle3, save_mtp
from tests.support.model_cells import CASES, CELLS, case_exists, cells_of
from tests.support.tiny_models import PageDealer, run_chunks, save_head, save_tiny_model, tiny_runner
from tests.support.transformers_models import MODELS, save_model

TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(40)]
FILES = {
    each.architecture: each for each in supported_models() if each.implementation == "native" and not each.reads_images
}
RECURRENT = frozenset(CASES[name] for name in HYBRIDS)
GUESSING = [
    pytest.param(CASES[name], method, marks=[] if CASES[name] == "qwen2" else pytest.mark.models)
    for name, model in FILES.items()
    for method in model.speculation
]
ROUNDED = [
    pytest.param(CASES[name], marks=[] if CASES[name] == "mixtral" else pytest.mark.models)
    for name, model in FILES.items()
    if model.quantised and name not in HYBRIDS
]
BOTH = [
    pytest.param(CASES[name], marks=[] if CASES[name] == "llama" else pytest.mark.models)
    for name, model in FILES.items()
    if model.through_transformers
]
ROUNDED_NAMES = re.compile(r"(?!.*weights_proj).*(_proj|_proj_with_mqa|\.w[123]|\.wq_b|\.wk)\.weight")
STACKED_NAMES = re.compile(r".*\.experts\.\w+_proj")
"""The experts of gpt-oss: one tensor has all, and each is transposed."""


def logits(folder: Path, **settings: Any) -> Any:
    runner = tiny_runner(folder, **settings)
    return run_chunks(runner, TOKENS, PageDealer(runner).table(40), [17, 1, 22])


@pytest.mark.parametrize("variant", ROUNDED)
def test_logits_equal_those_of_rounded_weights_when_a_model_is_quantised(variant: str, tmp_path: Path) -> None:
    architecture, changes = VARIANTS[variant]
    save_tiny_model(tmp_path, architecture, **changes)
    rounded = logits(tmp_path, quantization="int8")
    plain = logits(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name, weight in tensors.items():
        if name.endswith("shared_experts.down_proj.weight"):  # stored as so many experts
            parts = weight.split(changes["moe_intermediate_size"], dim=1)
            tensors[name] = torch.cat([rounded_by_loops(part, "int8") for part in parts], dim=1)
        elif ROUNDED_NAMES.fullmatch(name):
            tensors[name] = rounded_by_loops(weight, "int8")
        elif STACKED_NAMES.fullmatch(name):
            tensors[name] = torch.stack([rounded_by_loops(expert.T, "int8").T for expert in weight])
    save_file(tensors, file)
    difference = (logits(tmp_path) - rounded).abs().max()
    assert difference <= 1e-3
    assert (plain - rounded).abs().max() > 10 * difference, "nothing was rounded"


@pytest.mark.parametrize(("variant", "method"), GUESSING)
def test_text_is_that_without_guesses_when_a_model_guesses(
    variant: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, changes = VARIANTS[variant]
    (save_mtp if method == "mtp" else save_tiny_model)(tmp_path, architecture, **changes)
    draft = None
    if variant.startswith("gemma4") or variant in RECURRENT:
        # A draft's layers have equal numbers of heads, and no recurrent state.
        draft = tmp_path / "draft"
        save_tiny_model(draft, "llama")
    check_guesses(tmp_path, method, monkeypatch, draft)


@pytest.mark.models
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize("model_type", sorted(MODELS))
def test_text_is_that_without_guesses_when_a_model_of_transformers_guesses(
    model_type: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, model_type)
    save_tiny_model(tmp_path / "draft", "llama")
    check_guesses(tmp_path, method, monkeypatch, draft=tmp_path / "draft")  # a draft runs from a file of ours


def check_guesses(folder: Path, method: str, monkeypatch: pytest.MonkeyPatch, draft: Path | None = None) -> None:
    """Compares texts with and without guesses by look-up, by a draft (the model itself) or by untrained heads."""
    monkeypatch.setattr(DraftController, "choose", lambda self, *_, **__: self.levels[-1])
    plain, runner = make_engine(folder)
    guesses: dict[str, Any] = {"speculative_method": method, "num_speculative_tokens": 3}
    if method == "ngram":
        guesses["prompt_lookup_min"] = 1
    elif method == "eagle3":
        layer_ids = {"eagle_aux_hidden_state_layer_ids": [1, 2]}
        width, vocabulary = runner.config.hidden_size, runner.config.vocab_size
        tensors = eagle3_tensors(width, vocabulary, list(range(1, vocabulary, 2)), layer="layers.0.", num_taps=2)
        config = eagle3_config(width, vocabulary, vocabulary // 2, speculators=True) | layer_ids
        guesses["speculative_model"] = str(save_eagle3(folder / "eagle3", config, tensors))
    elif method == "head":
        guesses["speculative_model"] = str(
            save_head(folder / "head", runner.config.hidden_size, runner.config.num_layers)
        )
    elif method == "draft_model":
        guesses["speculative_model"] = str(draft or folder)
    guessing, _ = make_engine(folder, **guesses)
    assert generate(guessing, PROMPTS[:2], 24) == generate(plain, PROMPTS[:2], 24)
    assert guessing.stats().draft_tokens > 10


@pytest.mark.parametrize("variant", BOTH)
def test_both_implementations_make_one_text_when_a_file_of_ours_exists(variant: str, tmp_path: Path) -> None:
    architecture, changes = VARIANTS[variant]
    save_tiny_model(tmp_path, architecture, **changes)
    native, runner = make_engine(tmp_path)
    through, other = make_engine(tmp_path, model_impl="transformers")
    assert [each.config.model_impl for each in (runner, other)] == ["native", "transformers"]
    assert generate(through, PROMPTS, 24) == generate(native, PROMPTS, 24)


@pytest.mark.parametrize("architecture", [name for name, model in FILES.items() if not model.through_transformers])
def test_a_model_is_refused_through_transformers_when_the_page_says_so(architecture: str, tmp_path: Path) -> None:
    model_type, changes = VARIANTS[CASES[architecture]]
    save_tiny_model(tmp_path, model_type, **changes)
    with pytest.raises(ModelError, match=architecture):
        read_config(tmp_path, "transformers")


@pytest.mark.parametrize("column", CELLS)
def test_each_cell_names_a_test_that_exists(column: str) -> None:
    found = cells_of(column)
    assert found
    assert [cell for cell in found.values() if not case_exists(cell)] == []


@pytest.mark.parametrize("architecture", sorted(HYBRIDS))
def test_a_hybrid_claims_no_option_that_its_start_refuses(architecture: str, tmp_path: Path) -> None:
    model, (model_type, changes) = FILES[architecture], VARIANTS[CASES[architecture]]
    save_tiny_model(tmp_path, model_type, **changes)
    config = read_config(tmp_path)
    claimed: list[dict[str, Any]] = [{"speculative_method": "ngram"}] if "ngram" in model.speculation else []
    claimed += [{"tensor_parallel_size": 2}] if model.tensor_parallel else []
    claimed += [{"quantization": "int8"}] if model.quantised else []
    for options in claimed:
        check_recurrent(EngineSettings(model="any", **options), config, "cpu", moves_kv=False)
