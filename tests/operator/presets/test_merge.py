from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer_operator.crd import custom_resource_definition
from mini_infer_operator.presets.merge import LIST_KEYS, merged

PRESET: dict[str, Any] = {
    "match": {"families": ["llama"]},
    "image": "preset:1",
    "engine": {"maxModelLen": 8192, "kvCacheMemory": "8Gi", "extraArgs": ["--seed=1"]},
    "resources": {"requests": {"cpu": 4}, "limits": {"nvidia.com/gpu": 1}},
    "template": {"container": {"env": [{"name": "A", "value": "preset"}, {"name": "B", "value": "preset"}]}},
}


def test_a_preset_sets_all_that_a_service_leaves_out() -> None:
    result = merged({"model": {"uri": "demo"}, "unified": {"replicas": 2}}, PRESET)
    role = {name: PRESET[name] for name in ("engine", "resources", "template")}
    assert result.spec == {"model": {"uri": "demo"}, "image": "preset:1", "unified": {"replicas": 2, **role}}
    assert sorted(result.fields) == [
        "image",
        "unified.engine.extraArgs",
        "unified.engine.kvCacheMemory",
        "unified.engine.maxModelLen",
        "unified.resources.limits.nvidia.com/gpu",
        "unified.resources.requests.cpu",
        "unified.template.container.env",
    ]


def test_the_services_own_fields_win_when_both_write_them() -> None:
    own = {
        "image": "own:1",
        "prefill": {"engine": {"maxModelLen": 4096, "gpuMemoryUtilization": 0.5, "extraArgs": []}},
        "decode": {
            "resources": {"requests": {"cpu": 1}, "limits": None},
            "template": {"container": {"env": [{"name": "B", "value": "own"}, {"name": "C", "value": "own"}]}},
        },
    }
    result = merged(own, PRESET)
    assert result.spec["image"] == "own:1"
    assert result.spec["prefill"]["engine"] == own["prefill"]["engine"]
    assert result.spec["decode"]["resources"] == {"requests": {"cpu": 1}, "limits": {"nvidia.com/gpu": 1}}
    env = result.spec["decode"]["template"]["container"]["env"]
    assert [(item["name"], item["value"]) for item in env] == [("A", "preset"), ("B", "own"), ("C", "own")]
    assert not {field for field in result.fields if field.startswith(("image", "prefill.engine"))}
    assert "decode.template.container.env[A]" in result.fields
    assert "decode.template.container.env[B]" not in result.fields


def test_the_resource_has_no_other_keyed_lists_than_are_merged_by_item() -> None:
    def keyed(schema: Any, name: str = "") -> set[tuple[str, str]]:
        if not isinstance(schema, dict):
            return set()
        keys = {(name, key) for key in schema.get("x-kubernetes-list-map-keys", ())}
        inner = [*schema.get("properties", {}).items(), ("", schema.get("items"))]
        return keys.union(*(keyed(child, field) for field, child in inner))

    (version,) = custom_resource_definition()["spec"]["versions"]
    unified = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["unified"]["properties"]
    found = set().union(*(keyed(unified[name], name) for name in ("resources", "engine", "template", "parallelism")))
    assert found == set(LIST_KEYS.items())


values = st.integers() | st.booleans() | st.text(max_size=2)
names = st.sampled_from(["a", "b", "maxModelLen"])
engines = st.dictionaries(names, values | st.dictionaries(names, values, max_size=3), max_size=3)


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {path: value}
    return {key: leaf for name, inner in value.items() for key, leaf in leaves(inner, f"{path}.{name}").items()}


@given(engines, engines)
def test_every_value_is_the_services_or_a_named_one_of_the_preset(own: dict[str, Any], preset: dict[str, Any]) -> None:
    result = merged({"unified": {"engine": own}}, {"engine": preset})
    ours, theirs = leaves(own, "unified.engine"), leaves(preset, "unified.engine")
    got = leaves(result.spec["unified"]["engine"], "unified.engine")
    assert set(result.fields) == set(got) - set(ours)
    for path, value in got.items():
        assert value == (theirs[path] if path in result.fields else ours[path])
    again = merged(result.spec, {"engine": preset})
    assert (again.spec, again.fields) == (result.spec, ())


@pytest.mark.parametrize("preset", [{}, {"match": {"families": ["a"]}}])
def test_a_service_is_unchanged_when_a_preset_is_empty(preset: dict[str, Any]) -> None:
    spec = {"model": {"uri": "demo"}, "unified": {"replicas": 1}}
    assert merged(spec, preset).spec == spec
