from typing import Any

import pytest

from mini_infer_operator.presets.choose import PresetNotFoundError, chosen_preset, model_base_name

H200 = {"nvidia.com/gpu.product": "NVIDIA-H200"}
H100 = {"nvidia.com/gpu.product": "NVIDIA-H100"}


def preset(name: str, *families: str, gpu: dict[str, str] | None = None) -> dict[str, Any]:
    match = {"families": list(families), **({"gpu": gpu} if gpu else {})}
    return {"metadata": {"name": name}, "spec": {"match": match} if families else {}}


def spec(uri: str, nodes: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    role = {"template": {"spec": {"nodeSelector": nodes}}} if nodes else {}
    return {"model": {"uri": uri}, "unified": role, **fields}


PRESETS = [
    preset("named-only"),
    preset("llama", "llama", gpu=H200),
    preset("llama-8b", "llama-3.1-8b", gpu=H200),
    preset("llama-8b-zone", "llama-3.1-8b", gpu={**H200, "zone": "a"}),
    preset("llama-8b-h100", "llama-3.1-8b", gpu=H100),
    preset("demo-b", "demo"),
    preset("demo-a", "demo"),
]
LLAMA = "hf://meta-llama/Llama-3.1-8B-Instruct@main"


@pytest.mark.parametrize(
    ("service", "name"),
    [
        (spec(LLAMA, H200), "llama-8b"),
        (spec(LLAMA, {**H200, "zone": "a"}), "llama-8b-zone"),
        (spec(LLAMA, H100), "llama-8b-h100"),
        (spec(LLAMA), None),
        (spec("hf://meta-llama/Llama-3.1-80B", H200), "llama"),
        (spec("hf://meta-llama/Llamas-1", H200), None),
        (spec("demo"), "demo-a"),
        (spec("demo", unified={"resources": {"limits": {"nvidia.com/gpu": 1}}}), None),
        (spec("demo", unified={"resources": {"claims": [{"name": "gpu"}]}}), None),
        (spec("demo", preset="none"), None),
        (spec("demo", preset="named-only"), "named-only"),
        (spec("demo", preset="llama"), "llama"),
        ({"model": {"uri": LLAMA}, "prefill": {}, "decode": spec(LLAMA, H200)["unified"]}, None),
        ({"model": "demo", "unified": {}}, None),
        ({"model": {"uri": 3}, "unified": {}}, None),
        ({"model": {"uri": "demo"}, "unified": 3}, None),
    ],
)
def test_the_most_specific_preset_is_chosen(service: dict[str, Any], name: str | None) -> None:
    chosen = chosen_preset(service, PRESETS)
    assert (chosen["metadata"]["name"] if chosen else None) == name
    assert chosen_preset(service, PRESETS[::-1]) == chosen


@pytest.mark.parametrize("presets", [PRESETS, [], None])
def test_a_named_preset_is_missed_when_it_cannot_be_found(presets: list[dict[str, Any]] | None) -> None:
    with pytest.raises(PresetNotFoundError, match="absent") as caught:
        chosen_preset(spec("demo", preset="absent"), presets)
    assert caught.value.reason == "PresetNotFound"
    assert chosen_preset(spec("demo"), None) is None


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("demo", "demo"),
        ("hf://Qwen/Qwen3-8B@v1.0/x", "qwen3-8b"),
        ("oci://r.example.org:5000/models/Qwen3-8b:2026-11#weights/bf16", "qwen3-8b"),
        ("oci://example.org/qwen3@sha256:00", "qwen3"),
        ("pvc://claim/models/llama-3.1-8b/", "llama-3.1-8b"),
        ("https://models.example.org/qwen3/8b", "8b"),
        ("file:///models/a@b", "a@b"),
    ],
)
def test_a_model_has_a_base_name_in_every_scheme(uri: str, name: str) -> None:
    assert model_base_name(uri) == name
