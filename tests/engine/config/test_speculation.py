"""Options of speculation, and vLLM's form of them."""

import json
from typing import Any

import pytest

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.config.options.speculation import options_of_config, speculation_of
from mini_infer_engine.offline.vllm_keywords import to_own_names
from mini_infer_engine.server.cli import make_parser, settings_from


def settings(**options: Any) -> EngineSettings:
    return EngineSettings(model="demo", **options)


def test_speculation_is_off_when_it_is_not_configured() -> None:
    assert speculation_of(settings()) is None


def test_the_speculative_method_is_inferred_from_the_model() -> None:
    config = speculation_of(settings(speculative_model="small", num_speculative_tokens=3))
    assert config is not None
    assert (config.method, config.model, config.num_tokens) == ("draft_model", "small", 3)


@pytest.mark.parametrize(
    ("options", "message_part"),
    [
        ({"speculative_method": "draft_model"}, "set speculative_model"),
        ({"speculative_method": "eagle3"}, "set speculative_model"),
        ({"speculative_method": "mtp", "speculative_model": "small"}, "leave out speculative_model 'small'"),
        ({"speculative_method": "ngram", "speculative_model": "small"}, "leave out speculative_model 'small'"),
        ({"speculative_method": "ngram", "prompt_lookup_min": 5}, "prompt_lookup_min is 5"),
    ],
)
def test_conflicting_speculation_options_are_refused(options: dict[str, Any], message_part: str) -> None:
    with pytest.raises(ValueError, match=message_part):
        settings(**options)


VLLM_FORM = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 2}'


def test_vllms_speculative_config_is_parsed_from_the_command_line() -> None:
    made = settings_from(make_parser().parse_args(["--model", "demo", "--speculative-config", VLLM_FORM]))
    assert (made.speculative_method, made.num_speculative_tokens, made.prompt_lookup_max) == ("ngram", 5, 3)


def test_vllms_speculative_config_is_a_keyword_of_llm() -> None:
    assert to_own_names({"speculative_config": {"model": "small", "num_speculative_tokens": 2}}) == {
        "speculative_model": "small",
        "num_speculative_tokens": 2,
    }
    assert to_own_names({"speculative_config": None}) == {}


@pytest.mark.parametrize("method", ["mtp", "deepseek_mtp", "glm4_moe_mtp"])
def test_vllms_names_of_multi_token_prediction_are_mtp(method: str) -> None:
    values = {"method": method, "num_speculative_tokens": 1}
    assert options_of_config(values) == {"speculative_method": "mtp", "num_speculative_tokens": 1}


@pytest.mark.parametrize(
    ("text", "message_part"),
    [("{", "is no JSON"), ("[]", "must be an object"), ('{"method": "ngram", "quantization": "fp8"}', "quantization")],
)
def test_unknown_keys_of_speculative_config_are_named(text: str, message_part: str) -> None:
    with pytest.raises(ValueError, match=message_part):
        options_of_config(text)


@pytest.mark.parametrize(
    ("values", "message_part"),
    [
        ({"method": "medusa", "model": "head"}, "method = 'medusa'"),
        ({"method": ["ngram"]}, "method = "),
        ({"model": 5}, "model = 5"),
        ({"method": "ngram", "num_speculative_tokens": 8}, "num_speculative_tokens = 8.*7"),
        ({"method": "ngram", "num_speculative_tokens": "4"}, "num_speculative_tokens = '4'"),
        ({"method": "ngram", "prompt_lookup_max": 0}, "prompt_lookup_max = 0"),
        ({"method": "ngram", "prompt_lookup_min": True}, "prompt_lookup_min = True"),
    ],
)
def test_values_of_speculative_config_are_validated_like_flags(values: dict[str, Any], message_part: str) -> None:
    with pytest.raises(ValueError, match=message_part):
        options_of_config(values)
    with pytest.raises(ValueError, match=message_part):
        settings_from(make_parser().parse_args(["--model", "demo", "--speculative-config", json.dumps(values)]))
