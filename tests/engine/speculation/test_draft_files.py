"""A draft is compared with the model that it guesses for before any weight is read."""

import json
from pathlib import Path

import pytest

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.model_path import DEMO_DIRECTORY
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.speculation.draft_files import DraftFiles, find_draft
from tests.support.tiny_models import save_tiny_model

VOCABULARY = {"a": 0, "b": 1, "ab": 2}


def save(folder: Path, vocabulary: dict[str, int] | None, **changes: object) -> Path:
    save_tiny_model(folder, "qwen3", **changes)
    if vocabulary is not None:
        added = [{"content": "<end>", "id": 5}]
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    return folder


def find(target: Path, draft: Path, **options: object) -> DraftFiles | None:
    settings = EngineSettings(model=str(target), speculative_model=str(draft), **options)  # type: ignore[arg-type]
    return find_draft(settings, read_config(target), target)


def test_a_draft_is_accepted_when_only_its_table_is_padded_otherwise(tmp_path: Path) -> None:
    target = save(tmp_path / "target", VOCABULARY)
    found = find(target, save(tmp_path / "draft", VOCABULARY, vocab_size=211))
    assert found is not None
    assert found.config.vocab_size == 211


def test_a_draft_without_tokenizer_needs_the_same_vocabulary_size(tmp_path: Path) -> None:
    target = save(tmp_path / "target", VOCABULARY)
    assert find(target, save(tmp_path / "draft", None)) is not None
    with pytest.raises(ModelError, match="vocabulary of 211 tokens"):
        find(target, save(tmp_path / "other", None, vocab_size=211))


def test_a_draft_is_refused_naming_a_token_when_its_tokenizer_differs(tmp_path: Path) -> None:
    target = save(tmp_path / "target", VOCABULARY)
    with pytest.raises(ModelError, match=r"tokenizer .*'ab'"):
        find(target, save(tmp_path / "draft", VOCABULARY | {"ab": 3}))


def test_the_error_names_the_drafts_folder_when_it_is_missing(tmp_path: Path) -> None:
    target = save(tmp_path / "target", None)
    with pytest.raises(ModelError, match=r"speculative_model: .*folder"):
        find(target, tmp_path / "missing")


def test_the_method_is_named_when_a_head_comes_without_it(tmp_path: Path) -> None:
    target = save(tmp_path / "target", None)
    with pytest.raises(ModelError, match="speculative_method = 'head'"):
        find(target, DEMO_DIRECTORY.with_name("demo-head"))


def test_no_draft_is_looked_for_when_the_method_needs_none(tmp_path: Path) -> None:
    target = save(tmp_path / "target", None)
    settings = EngineSettings(model=str(target), speculative_method="ngram")
    assert find_draft(settings, read_config(target), target) is None
