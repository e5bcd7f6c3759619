"""`hf_overrides`: values that replace those of config.json, for our own models and those of transformers."""

from pathlib import Path
from typing import Any

import pytest

from mini_infer_contract.engine_options import ModelImpl
from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.options.hf_overrides import parse_hf_overrides
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.model_path import DEMO_DIRECTORY
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.offline.settings import settings_of


@pytest.mark.parametrize(
    ("text", "expected"), [(None, {}), ("", {}), ("{}", {}), ('{"a": {"b": [1]}}', {"a": {"b": [1]}})]
)
def test_overrides_are_a_json_object(text: str | None, expected: dict[str, Any]) -> None:
    assert parse_hf_overrides(text) == expected


@pytest.mark.parametrize("text", ["[]", "5", "{", '{"a": }', "rope_theta=5"])
def test_overrides_are_refused_by_name_when_they_are_no_object(text: str) -> None:
    with pytest.raises(ValueError, match="hf_overrides"):
        EngineSettings(model="demo", hf_overrides=text)


def test_objects_are_merged_and_other_values_are_replaced() -> None:
    file = Fields(Path("config.json"), {"a": 1, "text_config": {"b": 2, "c": {"d": [3]}}})
    made = file.overridden({"a": None, "e": 5, "text_config": {"c": {"d": [], "f": 6}}})
    assert made.values == {"a": None, "e": 5, "text_config": {"b": 2, "c": {"d": [], "f": 6}}}
    assert file.values["text_config"]["c"] == {"d": [3]}


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_a_model_is_configured_by_its_overrides(impl: ModelImpl) -> None:
    config = read_config(DEMO_DIRECTORY, impl, overrides={"max_position_embeddings": 77, "rope_theta": 123.0})
    assert config.max_position_embeddings == 77
    if impl == "native":
        assert config.ropes[0].theta == 123.0


def test_a_dict_is_taken_when_it_is_a_keyword_of_llm() -> None:
    settings = settings_of("demo", {"hf_overrides": {"rope_theta": 5}})
    assert parse_hf_overrides(settings.hf_overrides) == {"rope_theta": 5}
    with pytest.raises(ValueError, match="hf_overrides"):
        settings_of("demo", {"hf_overrides": print})
