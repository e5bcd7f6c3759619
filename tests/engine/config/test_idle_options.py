"""Options that change nothing are told of once, at start."""

import logging
from typing import Any

import pytest

from mini_infer_engine import LLM
from mini_infer_engine.config.options.idle_options import idle_options
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.server import cli

NGRAM = "needs --speculative-method ngram"


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        ({}, []),
        (
            {"num_speculative_tokens": 3},
            ["--num-speculative-tokens (needs --speculative-method or --speculative-model)"],
        ),
        ({"num_speculative_tokens": 3, "speculative_method": "ngram"}, []),
        ({"num_speculative_tokens": 3, "speculative_model": "small"}, []),
        (
            {"prompt_lookup_max": 3, "prompt_lookup_min": 1},
            [f"--prompt-lookup-max ({NGRAM})", f"--prompt-lookup-min ({NGRAM})"],
        ),
        ({"prompt_lookup_max": 3, "speculative_method": "ngram"}, []),
        ({"prompt_lookup_max": 3, "speculative_model": "small"}, [f"--prompt-lookup-max ({NGRAM})"]),
        (
            {"quantization_calibration": "none"},
            ["--quantization-calibration (needs --quantization int4 or w8a8-int8)"],
        ),
        (
            {"quantization_calibration": "none", "quantization": "fp8"},
            ["--quantization-calibration (needs --quantization int4 or w8a8-int8)"],
        ),
        ({"quantization_calibration": "none", "quantization": "int4"}, []),
        ({"quantization_calibration": "none", "quantization": "w8a8-int8"}, []),
    ],
)
def test_idle_options_are_listed_when_what_they_need_is_off(options: dict[str, Any], idle: list[str]) -> None:
    assert idle_options(EngineSettings(model="demo", **options)) == idle


def test_server_and_llm_warn_once_about_idle_options(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "configure_logging", lambda *_: None)  # it would take the log from this test
    monkeypatch.setattr(cli, "run", lambda *_: 0)
    for start in (
        lambda: cli.main(["demo", "--prompt-lookup-max", "3"]),
        lambda: LLM("dry", prompt_lookup_max=3),
    ):
        caplog.clear()
        start()
        [record] = [record for record in caplog.records if "effect" in record.message]
        assert record.levelno == logging.WARNING
        assert record.message == f"options without effect: --prompt-lookup-max ({NGRAM})"
