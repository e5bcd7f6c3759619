"""Tests what is read from the files of an embedding model or a classifier, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.pooling.pooler_config import PoolerConfig
from mini_infer_engine.config.pooling.read_pooler import read_pooler

POOLING = {"word_embedding_dimension": 8, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
DENSE = {"in_features": 8, "out_features": 4, "bias": False}
MODULES = ["Transformer", "Pooling", "Dense", "Normalize"]


def write_folder(folder: Path, files: dict[str, Any]) -> None:
    for name, values in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(values if isinstance(values, str) else json.dumps(values))


def modules(*names: str, path: str = "") -> list[dict[str, Any]]:
    return [
        {"idx": index, "type": f"sentence_transformers.models.{name}", "path": f"{index}_{name}" if index else path}
        for index, name in enumerate(names)
    ]


def read(folder: Path, **config: Any) -> PoolerConfig:
    return read_pooler(Fields(folder / "config.json", {"architectures": ["Qwen3Model"]} | config), folder, 8)


def test_a_folder_without_files_pools_the_last_token_and_normalises(tmp_path: Path) -> None:
    assert read(tmp_path) == PoolerConfig(size=8)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        (POOLING, "last"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_modules_are_read_when_the_folder_is_sentence_transformers(
    tmp_path: Path, pooling: dict[str, Any], expected: str
) -> None:
    write_folder(
        tmp_path,
        {
            "modules.json": modules(*MODULES),
            "1_Pooling/config.json": pooling,
            "2_Dense/config.json": DENSE | {"activation_function": "torch.nn.modules.linear.Identity"},
            "config_sentence_transformers.json": {"prompts": {"query": "Q: "}, "default_prompt_name": "query"},
            "sentence_bert_config.json": {"max_seq_length": 256},
        },
    )
    found = read(tmp_path, matryoshka_dimensions=[2, 4])
    assert (found.pooling_type, found.activation, found.size) == (expected, "normalize", 4)
    assert [(layer.has_bias, layer.activation) for layer in found.dense] == [(False, "identity")]
    assert (found.prompts, found.default_prompt_name, found.max_seq_length) == ({"query": "Q: "}, "query", 256)
    assert found.matryoshka_dimensions == [2, 4]


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"modules.json": "{"}, "modules.json"),
        ({"modules.json": {"0": {}}}, "modules.json"),
        ({"modules.json": modules("Transformer")}, "Pooling"),
        ({"modules.json": modules("Transformer", "Pooling", path="0_Transformer")}, "0_Transformer"),
        ({"modules.json": modules("Transformer", "Pooling", "LSTM")}, "LSTM"),
        ({"modules.json": modules("Transformer", "Normalize", "Pooling")}, "Normalize"),
        ({"modules.json": [*modules("Transformer"), {"type": "x.Pooling", "path": "../1_Pooling"}]}, "path"),
        ({"1_Pooling/config.json": {"pooling_mode_max_tokens": True}}, "pooling_mode_max_tokens"),
        ({"1_Pooling/config.json": {}}, "pooling_mode_lasttoken"),
        ({"1_Pooling/config.json": {"pooling_mode": "max"}}, "pooling_mode"),
        ({"1_Pooling/config.json": POOLING | {"pooling_mode_mean_tokens": True}}, "pooling_mode_mean_tokens"),
        ({"1_Pooling/config.json": POOLING | {"include_prompt": False}}, "include_prompt"),
        ({"2_Dense/config.json": DENSE | {"in_features": 16}}, "in_features"),
        ({"2_Dense/config.json": DENSE | {"activation_function": "torch.nn.modules.activation.SELU"}}, "SELU"),
        ({"config_sentence_transformers.json": {"prompts": {"query": 1}}}, "prompts"),
        ({"config_sentence_transformers.json": {"default_prompt_name": "query"}}, "default_prompt_name"),
        ({"sentence_bert_config.json": {"do_lower_case": True}}, "do_lower_case"),
    ],
)
def test_a_folder_is_refused_by_name_when_a_file_asks_for_more(
    tmp_path: Path, files: dict[str, Any], named: str
) -> None:
    whole = {"1_Pooling/config.json": POOLING, "2_Dense/config.json": DENSE}
    (tmp_path / "1_Pooling").mkdir()
    write_folder(tmp_path, whole | {"modules.json": modules("Transformer", "Pooling", "Dense")} | files)
    with pytest.raises(ModelError, match=named):
        read(tmp_path)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_labels": 3}, (3, "softmax", False)),
        ({"id2label": {"0": "good", "1": "bad"}, "problem_type": "multi_label_classification"}, (2, "sigmoid", False)),
        ({"id2label": {"0": "score"}}, (1, "sigmoid", True)),
        ({"id2label": {"0": "score"}, "problem_type": "regression"}, (1, "identity", True)),
        (
            {"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            (1, "identity", True),
        ),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "x.Sigmoid"}}, (1, "sigmoid", True)),
    ],
)
def test_a_classifiers_labels_and_activation_are_read_when_its_config_names_them(
    tmp_path: Path, config: dict[str, Any], expected: tuple[int, str, bool]
) -> None:
    found = read(tmp_path, architectures=["Qwen3ForSequenceClassification"], **config)
    assert (found.size, found.activation, found.is_cross_encoder) == expected
    assert len(found.labels) == found.size
    assert not found.generates


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"id2label": {}}, "id2label"),
        ({"num_labels": 10**9}, "id2label"),
        ({"problem_type": "other"}, "problem_type"),
        ({"sentence_transformers": {"activation_fn": "x.SELU"}}, "sentence_transformers"),
        ({"classifier_from_token": "yes"}, "classifier_from_token"),
        ({"classifier_from_token": ["yes"], "method": "from_2_way_softmax"}, "classifier_from_token"),
        ({"classifier_from_token": ["yes"], "method": "other"}, "method"),
        ({"classifier_from_token": ["yes"]}, "tokenizer"),
        ({"is_original_qwen3_reranker": True}, "tokenizer"),
    ],
)
def test_a_classifier_is_refused_by_name_when_its_config_asks_for_more(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        read(tmp_path, architectures=["Qwen3ForSequenceClassification"], **config)
