"""`mini-infer models`: what it lists, as a table and as JSON, without torch."""

import json
import os
import subprocess
import sys

import pytest

from mini_infer_engine.config.model.architectures import MODELS
from mini_infer_engine.config.model.transformers_architectures import REFUSED, THROUGH_TRANSFORMERS
from mini_infer_engine.config.model.vision import FAMILIES
from mini_infer_engine.config.pooling.read_pooler import ENCODERS
from mini_infer_engine.models.support import supported_models
from mini_infer_engine.tools.models import main
from tests.support.checkout import python_path


def test_the_table_has_a_line_for_each_architecture_when_no_form_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["ARCHITECTURE", "IMPLEMENTATION", "CPU", "GPU", "TP", "QUANTISED", "GGUF", "SPECULATION"]
    found = {line.split()[0]: line.split()[1:] for line in lines}
    assert found.keys() == {*MODELS, *FAMILIES, *THROUGH_TRANSFORMERS, *ENCODERS}
    assert len(lines) == len(found)
    assert found["LlamaForCausalLM"] == ["native", *["yes"] * 5, "ngram,", "draft_model,", "head,", "eagle3"]
    assert found["GPT2LMHeadModel"] == ["transformers", "yes", "yes", "no", "no", "no", "ngram,", "draft_model"]
    assert found["Qwen2MoeForCausalLM"][:4] == ["native", "yes", "yes", "yes"]
    assert found["BertModel"][:5] == ["transformers", "yes", "yes", "no", "no"]
    assert found["DeepseekV3ForCausalLM"][5] == "yes", "GGUF"
    assert found["CohereForCausalLM"][5] == "no", "GGUF"


def test_json_has_the_refused_architectures_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [model["architecture"] for model in found["models"]] == [each.architecture for each in supported_models()]
    assert {each["architecture"]: each["reason"] for each in found["refused"]} == REFUSED


def test_neither_torch_nor_transformers_is_imported_when_models_are_listed() -> None:
    code = "import sys; from mini_infer_engine.tools.models import main; main(['--json']); print(*sys.modules)"
    environment = os.environ | {"PYTHONPATH": python_path()}
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout
    assert not {"torch", "transformers", "numpy"} & set(shown.splitlines()[-1].split())
