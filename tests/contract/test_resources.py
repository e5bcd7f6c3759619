import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mini_infer_contract.resources import QUANTITY_PATTERN, ApiModel, InferenceService, parse_quantity
from mini_infer_operator.crd import custom_resource_definition
from mini_infer_operator.parse import InvalidServiceError, parse_service
from tests.support.services import VALID, changed, failing_examples

ROOT = Path(__file__).parents[2]
EXAMPLES = failing_examples()


def test_the_crd_is_what_the_models_say() -> None:
    stored = yaml.safe_load((ROOT / "crds" / "inferenceservices.yaml").read_text())
    assert stored == custom_resource_definition(), (
        "run: python -m mini_infer_operator.crd > crds/inferenceservices.yaml"
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=[str(example["change"])[:100] for example in EXAMPLES])
def test_a_broken_rule_is_told_with_its_path(example: dict[str, Any]) -> None:
    with pytest.raises(InvalidServiceError) as caught:
        parse_service(changed(example["change"]))
    lines = str(caught.value).splitlines()
    path = example["path"] or "the document"
    assert any(line.startswith(f"{path}: ") and example.get("message", "") in line for line in lines), lines


def test_every_rule_has_a_failing_example() -> None:
    messages = [rule.message for model in ApiModel.__subclasses__() for rule in model.rules]
    assert len(messages) >= 15
    shown = [example["message"] for example in EXAMPLES if "message" in example]
    assert [m for m in messages if not any(part in m for part in shown)] == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_are_valid(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        if document["kind"] == "InferenceService":
            parse_service(document)


@pytest.mark.parametrize(
    "uri",
    ["demo", "file:///models/a b", "pvc://claim", "pvc://my-claim/a/b", "hf://Qwen/Qwen3-8B@main", "hf://a/b.c_d"],
)
def test_model_uris(uri: str) -> None:
    assert parse_service(changed({"spec": {"model": {"uri": uri}}})).spec.model.uri == uri


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(InvalidServiceError) as caught:
        parse_service(changed({"spec": {"unified": {"replicas": -1, "engine": {"dtype": "int3"}, "extra": 1}}}))
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "spec.unified.replicas",
        "spec.unified.engine.dtype",
        "spec.unified.extra",
    ]


def test_models_are_frozen() -> None:
    service = InferenceService.model_validate(VALID)
    with pytest.raises(ValidationError):
        service.kind = "Other"  # type: ignore[misc, assignment]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (3, 3),
        ("250m", 0.25),
        ("1Gi", 2**30),
        ("1e3", 1000),
        (".5", 0.5),
        ("2E", 2e18),
        ("1.5k", 1500),
        ("3Ei", 3 * 2**60),
    ],
)
def test_quantities(text: int | str, number: float) -> None:
    assert parse_quantity(text) == number


@given(st.text(alphabet="0123456789.eEmkKMGi+-", max_size=8))
def test_a_quantity_is_read_or_refused_by_name(text: str) -> None:
    if re.match(QUANTITY_PATTERN, text):
        assert isinstance(parse_quantity(text), float)
    else:
        with pytest.raises(ValueError, match=re.escape(repr(text))):
            parse_quantity(text)
