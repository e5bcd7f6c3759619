"""Options and config files of models that read images."""

import json
from pathlib import Path
from typing import Any

import pytest

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.options.media_limits import parse_most_images
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.models.weights.tensor_names import model_names
from mini_infer_engine.offline.vllm_keywords import to_own_names
from mini_infer_engine.runtime.vision_limits import with_served_images
from tests.support.vision_models import FAMILIES, Family, config_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("{}", None),
        ('{"image": 4}', 4),
        ('{"image": 0, "video": 0, "audio": 0}', 0),
        ('{"image": {"count": 3, "width": 512}}', 3),
        ('{"video": 0}', None),
    ],
)
def test_the_most_images_are_read_as_vllm_writes_them(text: str | None, expected: int | None) -> None:
    assert parse_most_images(text) == expected
    EngineSettings(model="m", limit_mm_per_prompt=text)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("4", "JSON"),
        ('{"image": -1}', "image"),
        ('{"image": true}', "image"),
        ('{"video": 1}', "video"),
        ('{"x": 1}', "x"),
    ],
)
def test_a_limit_is_refused_when_it_is_no_count_of_images(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=f"limit_mm_per_prompt.*{word}"):
        EngineSettings(model="m", limit_mm_per_prompt=text)


def test_a_limit_is_an_object_when_it_is_a_keyword_of_llm() -> None:
    assert to_own_names({"limit_mm_per_prompt": {"image": 2}}) == {"limit_mm_per_prompt": '{"image":2}'}


def read(folder: Path, family: Family, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config_of(family) | changes))
    return read_config(folder, reads_images=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_has_a_vision_encoder_only_when_images_are_to_be_read(tmp_path: Path, family: Family) -> None:
    config = read(tmp_path, family)
    assert config.vision is not None
    assert (config.vision.family, config.vision.is_bidirectional) == (family, family == "gemma3")
    assert config.vision.num_deepstack == (2 if family == "qwen3_vl" else 0)
    assert config.ropes[0].sections_alternate == (family == "qwen3_vl")
    assert read_config(tmp_path).vision is None
    assert read(tmp_path, family, vision_config=None).vision is None


def test_an_older_file_is_read_when_its_text_config_stands_beside_the_vision_config(tmp_path: Path) -> None:
    nested = config_of("qwen2_5_vl")
    text = {name: value for name, value in nested["text_config"].items() if name != "rope_parameters"}
    older = {name: value for name, value in nested.items() if name != "text_config"} | text
    older |= {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    (tmp_path / "config.json").write_text(json.dumps(older))
    config = read_config(tmp_path, reads_images=True)
    assert config.ropes == read(tmp_path, "qwen2_5_vl").ropes
    assert config.ropes[0].sections == (2, 3, 3)
    assert config.vision is not None


@pytest.mark.parametrize(
    ("family", "field", "value"), [("qwen3_vl", "image_token_id", 199), ("gemma3", "mm_tokens_per_image", 9)]
)
def test_text_is_served_when_a_file_contradicts_itself_about_images(
    tmp_path: Path, family: Family, field: str, value: int
) -> None:
    config = read(tmp_path, family, **{field: value})
    assert with_served_images(EngineSettings(model="m"), config).vision is None
    with pytest.raises(ModelError, match=field):
        with_served_images(EngineSettings(model="m", limit_mm_per_prompt='{"image": 1}'), config)


OBSTACLES: dict[str, tuple[Family, dict[str, Any]]] = {
    "--attention-backend flash": ("gemma3", {"attention_backend": "flash"}),
    "--kv-cache-dtype": ("gemma3", {"kv_cache_dtype": "fp8"}),
}


@pytest.mark.parametrize("option", OBSTACLES)
def test_images_give_way_to_an_option_unless_they_are_requested_by_name(tmp_path: Path, option: str) -> None:
    family, options = OBSTACLES[option]
    config = read(tmp_path, family)
    assert with_served_images(EngineSettings(model="m", **options), config).vision is None
    requested = EngineSettings(model="m", **options, limit_mm_per_prompt='{"image": 1}')
    with pytest.raises(ModelError, match=option):
        with_served_images(requested, config)
    plain = EngineSettings(model="m", limit_mm_per_prompt='{"image": 1}')
    assert with_served_images(plain, config) is config
    none = EngineSettings(model="m", limit_mm_per_prompt='{"image": 0}')
    assert with_served_images(none, config).vision is None


def test_a_limit_of_images_is_refused_when_the_model_reads_text_alone(tmp_path: Path) -> None:
    text_model = read(tmp_path, "gemma3", vision_config=None)
    with pytest.raises(ModelError, match="limit_mm_per_prompt"):
        with_served_images(EngineSettings(model="m", limit_mm_per_prompt='{"image": 1}'), text_model)


@pytest.mark.parametrize(
    ("stored", "ours"),
    [
        ("visual.blocks.0.norm1.weight", "vision.tower.blocks.0.norm1.weight"),
        ("model.visual.merger.ln_q.weight", "vision.tower.merger.ln_q.weight"),
        ("vision_tower.vision_model.post_layernorm.bias", "vision.tower.post_layernorm.bias"),
        ("model.vision_tower.post_layernorm.bias", "vision.tower.post_layernorm.bias"),
        ("multi_modal_projector.mm_soft_emb_norm.weight", "vision.projector.mm_soft_emb_norm.weight"),
        ("model.language_model.layers.0.x", "model.layers.0.x"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_tensors_of_the_encoder_are_named_in_all_forms_of_checkpoints(stored: str, ours: str) -> None:
    names = [stored, "model.language_model.norm.weight"]
    assert model_names(names, reads_images=True)[stored] == ours
    assert (stored in model_names(names)) == (not ours.startswith("vision."))
