"""Finds the draft model's folder and compares it with the target model before any of its weights is read."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.config.options.speculation import speculation_of
from mini_infer_engine.model_path import resolve_model
from mini_infer_engine.models.eagle3 import Eagle3Shape
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.speculation.eagle3_files import parse_eagle3, read_if_eagle3
from mini_infer_engine.speculation.head import ARCHITECTURE


@dataclass(frozen=True, slots=True)
class DraftFiles:
    """A draft model that fits its target."""

    config: ModelConfig
    directory: Path


@dataclass(frozen=True, slots=True)
class Eagle3Files:
    """An EAGLE-3 head that fits its target."""

    shape: Eagle3Shape
    directory: Path


def find_draft(
    settings: EngineSettings, target: ModelConfig, target_directory: Path
) -> DraftFiles | Eagle3Files | None:
    """Returns the draft model or the EAGLE-3 head that the settings name, or None if they name none.

    Raises:
        ModelError: there is no such model, or its tokens are not those of the target.
    """
    speculation = speculation_of(settings)
    if speculation is None or speculation.model is None or speculation.method not in ("draft_model", "eagle3"):
        return None
    name = f"speculative_model {speculation.model!r}"
    directory = resolve_speculative_model(speculation.model, weights=settings.load_format != "dummy")
    if (eagle3 := read_if_eagle3(directory)) is not None:
        return Eagle3Files(parse_eagle3(eagle3, target), directory)
    if speculation.method == "eagle3":
        raise ModelError(
            f"{name}: its config.json has neither speculators_model_type nor draft_vocab_size, and so is no EAGLE-3 "
            "head's: leave out speculative_method, or choose another folder."
        )
    try:
        config = read_config(directory, "native")
    except ModelError as error:
        remedy = " A trained head goes with speculative_method = 'head'." if ARCHITECTURE in str(error) else ""
        raise ModelError(f"{name}: {error}{remedy}") from None
    if config.recurrence is not None:
        raise ModelError(
            f"{name} has layers with a recurrent state, which cannot go back behind rejected tokens yet: choose "
            "a draft of another architecture."
        )
    if config.head_shapes is not None:
        raise ModelError(
            f"{name} has layers with different KV heads, which drafts do not support yet: choose a draft of another "
            "architecture."
        )
    ours, theirs = _vocabulary(target_directory), _vocabulary(directory)
    # Equal tokenizers come with tables of different padding: those of Qwen2.5 have 151,936 rows, or 152,064.
    if config.vocab_size != target.vocab_size and (ours is None or theirs is None):
        raise ModelError(
            f"{name} has a vocabulary of {config.vocab_size} tokens, and the model it guesses for one of "
            f"{target.vocab_size}: choose a draft of the same family."
        )
    difference = _first_difference(ours, theirs)
    if difference is not None:
        raise ModelError(
            f"{name} has another tokenizer than the model it guesses for: they differ in token {difference!r}. Choose "
            "a draft of the same family."
        )
    context = settings.max_model_len or target.max_position_embeddings
    if config.max_position_embeddings < context:
        raise ModelError(
            f"{name} has a context of {config.max_position_embeddings} tokens, and the engine one of {context}: set "
            f"max_model_len = {config.max_position_embeddings}, or choose another draft."
        )
    return DraftFiles(config, directory)


def resolve_speculative_model(name: str, *, weights: bool) -> Path:
    """Returns the folder of a draft or head. Raises ModelError if there is none."""
    try:
        return resolve_model(name, weights=weights)
    except ModelError as error:
        raise ModelError(f"speculative_model: {error}") from None


def _vocabulary(directory: Path) -> dict[str, int] | None:
    """Returns the tokens and ids of a folder's tokenizer, or None if it has none in the usual form."""
    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        listed = values["model"]["vocab"]
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(listed, dict):
        return None
    return {**listed, **{token["content"]: token["id"] for token in values.get("added_tokens", [])}}


def _first_difference(ours: dict[str, int] | None, theirs: dict[str, int] | None) -> str | None:
    """Returns a token whose ids differ, or None if there is none or one of the vocabularies is unknown."""
    if ours is None or theirs is None or ours == theirs:
        return None
    return min(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
