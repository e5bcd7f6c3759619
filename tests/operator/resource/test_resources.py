import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mini_infer_contract.engine_options import PARALLEL, EngineOptions
from mini_infer_contract.options import option_rows
from mini_infer_operator.crd import (
    custom_resource_definition,
    custom_resource_definitions,
    preset_definition,
    scaler_definition,
)
from mini_infer_operator.parse import InvalidServiceError, parse_preset, parse_service, read_presets
from mini_infer_operator.resource import (
    QUANTITY_PATTERN,
    RESERVED_ENGINE_FLAGS,
    ApiModel,
    InferenceService,
    parse_quantity,
)
from tests.support.services import VALID, VALID_PRESET, changed, failing_examples, failing_presets

ROOT = Path(__file__).parents[3]
EXAMPLES = failing_examples()


def test_the_stored_crd_equals_the_models_schema() -> None:
    stored = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "crds").glob("*.yaml"))]
    made = sorted(custom_resource_definitions(), key=lambda crd: crd["metadata"]["name"])
    assert stored == made, "run: make crds"
    assert all(
        (ROOT / "charts/mini-infer/crds" / p.name).read_text() == p.read_text() for p in (ROOT / "crds").iterdir()
    )


def test_every_crd_field_has_a_description() -> None:
    def undescribed(schema: dict[str, Any], path: str) -> list[str]:
        properties = schema.get("properties", {}).items()
        missing = [f"{path}.{name}" for name, field in properties if not field.get("description")]
        inner = [*properties, ("items", schema.get("items")), ("values", schema.get("additionalProperties"))]
        return missing + [line for name, child in inner if child for line in undescribed(child, f"{path}.{name}")]

    (version,) = custom_resource_definition()["spec"]["versions"]
    found = undescribed(version["schema"]["openAPIV3Schema"], "infsvc")
    (scaler,) = scaler_definition()["spec"]["versions"]
    assert undescribed(scaler["schema"]["openAPIV3Schema"], "infscaler") == ["infscaler.metadata"]
    (preset,) = preset_definition()["spec"]["versions"]
    assert undescribed(preset["schema"]["openAPIV3Schema"], "infpreset") == ["infpreset.metadata"]
    fields = "template|resources|kvCache|parallelism|scaling"
    described_once = re.compile(rf"infsvc\.spec\.(prefill|decode)\.({fields})\..+")  # described in unified
    # metadata the API server describes itself, and lets nobody else describe
    assert [path for path in found if not described_once.fullmatch(path)] == ["infsvc.metadata"]


def test_the_crd_fits_into_an_annotation() -> None:
    """`kubectl apply` keeps it in an annotation, as JSON without spaces, and all annotations are 256 KB at most."""
    assert len(json.dumps(custom_resource_definition(), separators=(",", ":"))) < 210_000


@pytest.mark.parametrize("example", EXAMPLES, ids=[str(example["change"])[:100] for example in EXAMPLES])
def test_the_path_is_reported_when_a_rule_is_broken(example: dict[str, Any]) -> None:
    with pytest.raises(InvalidServiceError) as caught:
        parse_service(changed(example["change"]))
    lines = str(caught.value).splitlines()
    path = example["path"] or "the document"
    assert any(line.startswith(f"{path}: ") and example.get("message", "") in line for line in lines), lines


@pytest.mark.parametrize("example", failing_presets(), ids=lambda example: str(example["change"])[:100])
def test_the_path_is_reported_when_a_preset_breaks_a_rule(example: dict[str, Any]) -> None:
    with pytest.raises(InvalidServiceError) as caught:
        parse_preset(changed(example["change"], VALID_PRESET))
    lines = str(caught.value).splitlines()
    path = example["path"] or "the document"
    assert any(path in line and example.get("message", "") in line for line in lines), lines


def test_example_presets_are_valid_when_their_folder_is_read() -> None:
    assert [p["metadata"]["name"] for p in read_presets(ROOT / "examples/presets")] == [
        "demo-cpu",
        "llama-3.1-8b-h200",
        "qwen3-30b-a3b-h200",
    ]


def test_every_validation_rule_has_a_failing_example() -> None:
    def models(base: type[ApiModel]) -> list[type[ApiModel]]:
        return [model for child in base.__subclasses__() for model in (child, *models(child))]

    messages = [rule.message for model in models(ApiModel) for rule in model.rules]
    assert len(messages) >= 25
    shown = [example["message"] for example in [*EXAMPLES, *failing_presets()] if "message" in example]
    assert [m for m in messages if not any(part in m for part in shown)] == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_example_services_are_valid(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        if document["kind"] == "InferenceService":
            parse_service(document)


@pytest.mark.parametrize(
    "uri",
    [
        "demo",
        "file:///models/a b",
        "pvc://claim",
        "pvc://my-claim/a/b",
        "hf://Qwen/Qwen3-8B@main",
        "hf://a/b.c_d",
        "oci://qwen3",
        "oci://registry.example.org:5000/models/qwen3-8b:2026-11#weights/bf16",
        f"oci://example.org/qwen3@sha256:{'0' * 64}",
    ],
)
def test_model_uris_are_accepted(uri: str) -> None:
    assert parse_service(changed({"spec": {"model": {"uri": uri}}})).spec.model.uri == uri


def test_all_validation_faults_are_reported_together() -> None:
    with pytest.raises(InvalidServiceError) as caught:
        parse_service(changed({"spec": {"unified": {"replicas": -1, "engine": {"dtype": "int3"}, "extra": 1}}}))
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "spec.unified.replicas",
        "spec.unified.engine.dtype",
        "spec.unified.extra",
    ]


@pytest.mark.parametrize(
    "image", ["engine", "a/b:1", "r.example.org:5000/a/b_c--d.e:V1.0", "localhost/e:x@sha256:" + "0" * 64]
)
def test_image_names_are_accepted(image: str) -> None:
    assert parse_service(changed({"spec": {"image": image}})).spec.image == image


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"pageSize": 64}, {"pageSize": 128}),
        ({"quantization": "int8"}, {"quantization": "int8", "quantizeLmHead": False, "loadFormat": "auto"}),
        ({"kvCacheDtype": "auto", "kvTransport": "auto", "loadFormat": "auto"}, {}),
        ({"kvCacheDtype": "fp8"}, {"kvCacheDtype": "fp8_e4m3", "pageSize": 128}),
        ({"kvTransport": "nixl"}, {}),
        ({}, {"kvTransport": "cuda-ipc"}),
        ({"kvTransport": "shm"}, {"kvTransport": "shm"}),
    ],
)
def test_prefill_and_decode_options_are_accepted_when_they_match(
    prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    parse_service(changed({"spec": {"unified": None, "prefill": {"engine": prefill}, "decode": {"engine": decode}}}))


def test_prefill_and_decode_may_have_different_tensor_parallel_sizes() -> None:
    engine = {"kvTransport": "nixl"}
    roles = {"prefill": {"engine": engine}, "decode": {"engine": engine, "parallelism": {"tensor": 2}}}
    parse_service(changed({"spec": {"unified": None, **roles}}))


def test_every_parallelism_flag_is_reserved_in_extra_args() -> None:
    """With its aliases: what `parallelism` says is what GPUs are counted by."""
    rows = [row for row in option_rows(EngineOptions) if row.option.group == PARALLEL]
    flags = {flag for row in rows for flag in (row.flag, *row.option.aliases)}
    assert flags - {*RESERVED_ENGINE_FLAGS} == {"--master-addr", "--master-port"}


def test_extra_args_accept_values_that_begin_with_a_dash() -> None:
    parse_service(changed({"spec": {"unified": {"engine": {"extraArgs": ["--seed", "-1", "--dry-run"]}}}}))


def test_kubernetes_types_keep_their_field_names_and_values() -> None:
    """Also where a field is named otherwise in Python: the text is what revisions are named by."""
    container = {
        "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}, {"name": "B", "value": ""}],
        "securityContext": {"runAsUser": 0, "capabilities": {"add": ["SYS_PTRACE"]}},
    }
    spec = {"volumes": [{"name": "v", "downwardAPI": {"items": []}}], "tolerations": [{"operator": "Exists"}]}
    service = parse_service(changed({"spec": {"unified": {"template": {"container": container, "spec": spec}}}}))
    template = service.roles["unified"].template
    assert template is not None
    dumped = template.model_dump(mode="json", exclude_defaults=True)
    assert dumped["container"] == {"env": container["env"], "security_context": container["securityContext"]}
    assert dumped["spec"] == spec


def test_lower_tiers_are_accepted_when_decodes_select_pages() -> None:
    unified = {"kvCache": {"host": "64Gi", "dtype": "int4"}, "engine": {"kvSelection": "quest"}}
    parsed = parse_service(changed({"spec": {"unified": unified}})).spec.unified
    assert parsed is not None
    assert parsed.kv_cache is not None
    assert parsed.engine is not None
    assert (parsed.kv_cache.host, parsed.engine.kv_selection) == ("64Gi", "quest")


def test_resource_models_are_frozen() -> None:
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
        ("1e400", 2**63),
        ("-1e400", -(2**63)),
        (10**400, 2**63),
    ],
)
def test_quantities_are_parsed(text: int | str, number: float) -> None:
    assert parse_quantity(text) == number


@given(st.text(alphabet="0123456789.eEmkKMGi+-", max_size=8))
def test_a_quantity_is_parsed_or_named_in_the_error(text: str) -> None:
    if re.match(QUANTITY_PATTERN, text):
        assert isinstance(parse_quantity(text), float)
    else:
        with pytest.raises(ValueError, match=re.escape(repr(text))):
            parse_quantity(text)
