"""EAGLE-3 heads, in the `speculators` format and the original one, guess what their definition says."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core.speculation.controller import DraftController
from tests.engine.speculation.test_same_text import requests, run
from tests.support.hidden_drafts import (
    Eagle3Reference,
    eagle3_config,
    eagle3_tensors,
    recorded_guesses,
    save_eagle3,
    save_exact_eagle3,
)
from tests.support.tiny_models import save_tiny_model

WIDTH, VOCABULARY = 64, 199
SOME_TOKENS = list(range(1, VOCABULARY, 2))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("target")
    return folder, save_tiny_model(folder, "qwen3", num_hidden_layers=7)


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses are made however long a pass of a tiny model takes with them."""
    monkeypatch.setattr(DraftController, "choose", lambda self, *_, **__: self.levels[-1])


def greedy(*lengths: int, tokens: int = 14) -> list[Request]:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = [[(place * 7 + index) % 23 + 4 for place in range(length)] for index, length in enumerate(lengths)]
    return [
        Request(request_id=str(index), prompt_token_ids=one, sampling=sampling) for index, one in enumerate(prompts)
    ]


def save(folder: Path, *, speculators: bool, **changes: Any) -> Path:
    tensors = eagle3_tensors(WIDTH, VOCABULARY, SOME_TOKENS, layer="layers.0." if speculators else "midlayer.")
    return save_eagle3(folder, eagle3_config(WIDTH, VOCABULARY, 99, speculators=speculators) | changes, tensors)


FORMS: dict[str, dict[str, Any]] = {
    "original": {"speculators": False},
    "speculators": {"speculators": True},
    "speculators, other layers": {"speculators": True, "eagle_aux_hidden_state_layer_ids": [1, 4, 6]},
    "speculators, sum before the norm": {"speculators": True, "norm_before_residual": False},
}


@pytest.mark.parametrize("form", FORMS)
def test_eagle3_guesses_equal_its_definition(target: tuple[Path, Any], tmp_path: Path, form: str) -> None:
    folder, model = target
    is_new = FORMS[form]["speculators"]
    layer, ids = "layers.0." if is_new else "midlayer.", FORMS[form].get("eagle_aux_hidden_state_layer_ids", (2, 3, 4))
    before = FORMS[form].get("norm_before_residual", is_new)
    tensors = eagle3_tensors(WIDTH, VOCABULARY, SOME_TOKENS, layer=layer)
    reference = Eagle3Reference(model, tensors, layer=layer, ids=tuple(ids), before_residual=before)
    with recorded_guesses() as found:
        guessed, _ = run(
            folder, greedy(9, 17, 30), speculative_model=str(save(tmp_path, **FORMS[form])), num_speculative_tokens=3
        )
    assert guessed == run(folder, greedy(9, 17, 30))[0]
    assert len(found) > 20
    for text, guesses in found[:: len(found) // 15]:
        assert guesses == reference.guesses(text, len(guesses)), f"after {len(text)} tokens"


def test_embeddings_are_the_models_when_the_head_has_none(target: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = target
    tensors = eagle3_tensors(WIDTH, VOCABULARY, list(range(VOCABULARY)), layer="midlayer.")
    for name in ("embed_tokens.weight", "t2d", "d2t"):
        del tensors[name]
    config = eagle3_config(WIDTH, VOCABULARY, VOCABULARY, speculators=False)
    reference = Eagle3Reference(model, tensors, layer="midlayer.", ids=(2, 3, 4), before_residual=False)
    with recorded_guesses() as found:
        run(folder, greedy(12), speculative_model=str(save_eagle3(tmp_path, config, tensors)), num_speculative_tokens=2)
    assert len(found) > 5
    for text, guesses in found[::4]:
        assert guesses == reference.guesses(text, len(guesses))


@pytest.mark.parametrize("step_depth", [0, 1])
def test_text_with_eagle3_equals_the_plain_engines(target: tuple[Path, Any], tmp_path: Path, step_depth: int) -> None:
    """Greedy and sampled, with stop tokens, penalties, biases and log probabilities."""
    folder, _ = target
    options = {"speculative_model": str(save(tmp_path, speculators=True)), "speculative_method": "eagle3"}
    guessed, stats = run(folder, requests(), step_depth=step_depth, **options)
    assert guessed == run(folder, requests())[0]
    assert stats.draft_tokens > 50


def test_every_draft_token_is_accepted_when_the_head_is_exact(tmp_path: Path) -> None:
    target, draft = save_exact_eagle3(tmp_path)
    sampling = SamplingParams(temperature=0.0, max_tokens=1 + 4 * 10)
    prompts = [list(range(70, 79)), list(range(80, 96))]
    asked = [
        Request(request_id=str(index), prompt_token_ids=one, sampling=sampling) for index, one in enumerate(prompts)
    ]
    guessed, stats = run(target, asked, speculative_model=str(draft), num_speculative_tokens=3, step_depth=0)
    for one, prompt in zip(guessed, prompts, strict=True):
        assert one[0] == [64 + (prompt[-1] + place) % 64 for place in range(1, 42)]
    assert stats.draft_tokens == sum(stats.accepted_tokens_by_position) == 3 * 2 * 10


@pytest.mark.parametrize(
    ("speculators", "changes", "message_part"),
    [
        (True, {"speculators_model_type": "eagle"}, "speculators_model_type = 'eagle'"),
        (True, {"norm_before_fc": True}, "norm_before_fc = True"),
        (True, {"transformer_layer_config": None}, "transformer_layer_config = None"),
        (True, {"target_hidden_size": 96}, "target_hidden_size = 96.* 64 "),
        (True, {"draft_vocab_size": 200}, "draft_vocab_size = 200.* 199 "),
        (True, {"eagle_aux_hidden_state_layer_ids": [4, 2]}, "eagle_aux_hidden_state_layer_ids"),
        (True, {"eagle_aux_hidden_state_layer_ids": [2, 4, 7]}, "eagle_aux_hidden_state_layer_ids"),
        (False, {"hidden_size": 96}, "hidden_size = 96.* 64 "),
        (False, {"vocab_size": 211}, "vocab_size = 211.* 199 "),
        (False, {"num_hidden_layers": 2}, "num_hidden_layers = 2"),
        (False, {"model_type": "qwen3"}, "model_type = 'qwen3'"),
        (False, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = False"),
        (False, {"draft_vocab_size": 98}, r"d2t has shape \[99\].*\[98\]"),
    ],
)
def test_eagle3_is_refused_when_its_config_does_not_fit(
    target: tuple[Path, Any], tmp_path: Path, speculators: bool, changes: dict[str, Any], message_part: str
) -> None:
    draft = save(tmp_path, speculators=speculators, **changes)
    with pytest.raises(ModelError, match=message_part):
        run(target[0], [], speculative_model=str(draft))


def test_eagle3_is_refused_when_d2t_names_tokens_that_the_model_has_not(
    target: tuple[Path, Any], tmp_path: Path
) -> None:
    tensors = eagle3_tensors(WIDTH, VOCABULARY, SOME_TOKENS, layer="midlayer.")
    tensors["d2t"] = torch.full_like(tensors["d2t"], 150)
    draft = save_eagle3(tmp_path, eagle3_config(WIDTH, VOCABULARY, 99, speculators=False), tensors)
    with pytest.raises(ModelError, match="d2t must name 99"):
        run(target[0], [], speculative_model=str(draft))


def test_eagle3_is_refused_when_the_folder_has_another_model(target: tuple[Path, Any]) -> None:
    with pytest.raises(ModelError, match=r"speculative_model.*draft_vocab_size.*leave out speculative_method"):
        run(target[0], [], speculative_model=str(target[0]), speculative_method="eagle3")
