"""Tests which models run in the pooling engine, and which in the engine core."""

from pathlib import Path
from typing import Any

import pytest

from mini_infer_contract.engine_options import ModelImpl
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.pooling.engine_choice import runs_in_pooling_engine
from tests.support.pooling_models import write_modules

RERANKER = {"architectures": ["GemmaForSequenceClassification"], "classifier_from_token": ["Yes"]}


def chosen(folder: Path, config: dict[str, Any], impl: ModelImpl = "auto") -> bool:
    return runs_in_pooling_engine(Fields(folder / "config.json", config), folder, impl)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["BertModel"], "model_type": "bert"}, True),
        ({"architectures": ["XLMRobertaForMaskedLM"], "model_type": "xlm-roberta"}, True),
        ({"architectures": ["BertLMHeadModel"], "model_type": "bert"}, False),
        ({"architectures": ["Qwen3Model"]}, False),
        ({"architectures": ["Qwen3ForCausalLM"]}, False),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, False),
        ({"architectures": ["Starcoder2ForSequenceClassification"]}, True),
        ({"architectures": ["Starcoder2Model"]}, True),
        ({"architectures": ["GPT2LMHeadModel"]}, False),
        ({"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True}, True),
        ({"architectures": ["Qwen2VLModel"], "vision_config": {}}, False),
        (RERANKER, False),
        ({}, False),
    ],
)
def test_the_engine_core_runs_what_it_can(tmp_path: Path, config: dict[str, Any], expected: bool) -> None:
    assert chosen(tmp_path, config) == expected


def test_transformers_code_runs_a_classifier_when_it_is_requested(tmp_path: Path) -> None:
    config = {"architectures": ["Qwen3ForSequenceClassification"]}
    assert chosen(tmp_path, config, "transformers")
    assert not chosen(tmp_path, config, "native")


@pytest.mark.parametrize(("pooling", "expected"), [("lasttoken", False), ("mean_tokens", True), ("cls_token", True)])
def test_a_decoder_is_computed_whole_when_it_pools_more_than_the_last_token(
    tmp_path: Path, pooling: str, expected: bool
) -> None:
    write_modules(tmp_path, "Pooling", pooling=pooling)
    assert chosen(tmp_path, {"architectures": ["Qwen3Model"]}) == expected


def test_a_decoder_is_refused_when_it_reads_in_both_directions_without_code_for_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is_causal"):
        chosen(tmp_path, {"architectures": ["Qwen2Model"], "is_causal": False})
