"""Which scheme a layer has, by its name, after compressed-tensors' groups and GPTQModel's `dynamic`."""

import time
from pathlib import Path
from typing import Any

import pytest

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.quantization.checkpoint import parse_quantization
from mini_infer_engine.config.quantization.fp4 import Fp4Scheme
from mini_infer_engine.config.quantization.integer import IntegerScheme
from mini_infer_engine.config.quantization.schemes import Fp8Scheme, Rule, Schemes

INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": True}
INT8 = {"type": "int", "num_bits": 8, "strategy": "channel", "symmetric": True}
FP8 = {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True}
NVFP4 = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16, "symmetric": True}
FORMATS = {"int4": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized", "nvfp4": "nvfp4-pack-quantized"}
WEIGHTS: dict[str, Any] = {"int4": INT4, "int8": INT8, "fp8": FP8, "nvfp4": NVFP4, "": None}
DOWN, Q, HEAD = "model.layers.3.mlp.down_proj", "model.layers.3.self_attn.q_proj", "lm_head"


def parsed(raw: dict[str, Any]) -> Schemes:
    schemes = parse_quantization(Fields(Path("config.json"), {"quantization_config": raw}))
    assert schemes is not None
    return schemes


def compressed(groups: list[tuple[str, list[str]]], ignore: list[str]) -> dict[str, Any]:
    config_groups = {
        f"group_{number}": {"targets": targets, "weights": WEIGHTS[kind], "format": FORMATS.get(kind)}
        for number, (kind, targets) in enumerate(groups)
    }
    form = "mixed-precision"
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": config_groups, "ignore": ignore}


def kind_of(schemes: Schemes, layer: str) -> str:
    scheme = schemes.scheme_of(layer)
    if isinstance(scheme, IntegerScheme):
        return f"int{scheme.bits}"
    return {Fp8Scheme: "fp8", Fp4Scheme: "nvfp4", type(None): ""}[type(scheme)]


@pytest.mark.parametrize(
    ("groups", "ignore", "expected"),
    [
        pytest.param([("fp8", ["Linear"])], [], ("fp8", "fp8", "fp8"), id="one for all"),
        pytest.param([("fp8", ["Linear"])], ["lm_head", "re:.*q_proj"], ("fp8", "", ""), id="ignored"),
        pytest.param(
            [("int4", ["Linear"]), ("int8", [DOWN])], [HEAD], ("int8", "int4", ""), id="a name before a class"
        ),
        pytest.param(
            [("int4", ["Linear"]), ("fp8", ["re:.*down_proj"])],
            [HEAD],
            ("fp8", "int4", ""),
            id="a pattern before a class",
        ),
        pytest.param(
            [("int4", ["re:.*mlp.*"]), ("fp8", [DOWN])],
            [],
            ("fp8", "", ""),
            id="a name before a pattern, others are none's",
        ),
        pytest.param(
            [("nvfp4", ["re:.*mlp.*"]), ("fp8", ["re:.*down_proj"])], [], ("fp8", "", ""), id="patterns by the alphabet"
        ),
        pytest.param(
            [("int4", ["re:self_attn"]), ("fp8", ["re:model.*"])], [], ("fp8", "fp8", ""), id="from the beginning"
        ),
        pytest.param([("fp8", ["Linear"]), ("", ["re:.*q_proj"])], [HEAD], ("fp8", "", ""), id="activations alone"),
        pytest.param([("fp8", ["lm_head"])], [], ("", "", "fp8"), id="the head alone"),
        pytest.param([("fp8", ["Linear"])], [DOWN, "re:.*"], ("", "", ""), id="ignored before all else"),
        pytest.param([("fp8", ["LlamaAttention"])], [], ("", "", ""), id="another class"),
        pytest.param(
            [("int4", [Q, DOWN]), ("fp8", ["Linear", "LlamaAttention"])],
            [],
            ("int4", "int4", "fp8"),
            id="several targets",
        ),
    ],
)
@pytest.mark.parametrize("order", [1, -1])
def test_the_most_specific_quantisation_target_wins(
    groups: list[tuple[str, list[str]]], ignore: list[str], expected: tuple[str, ...], order: int
) -> None:
    """As compressed-tensors has it, whatever the groups' order."""
    schemes = parsed(compressed(groups[::order], ignore))
    assert tuple(kind_of(schemes, layer) for layer in (DOWN, Q, HEAD)) == expected


@pytest.mark.parametrize(
    ("dynamic", "expected"),
    [
        ({}, "int4"),
        ({r"+:.*\.down_proj": {"bits": 8, "group_size": 32}}, "int8"),
        ({r".*\.down_proj": {"bits": 8}}, "int8"),
        ({r"down_proj": {"bits": 8}}, "int4"),
        ({r"-:.*\.mlp\..*": {}}, ""),
        ({r"-:.*\.mlp\..*": {}, r".*down_proj": {"bits": 8}}, ""),
        ({r".*down_proj": {"bits": 8}, r"-:.*\.mlp\..*": {}}, "int8"),
    ],
)
def test_the_first_matching_dynamic_pattern_wins(dynamic: dict[str, Any], expected: str) -> None:
    schemes = parsed({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": dynamic})
    assert kind_of(schemes, DOWN) == expected
    assert kind_of(schemes, Q) == "int4"
    assert kind_of(schemes, HEAD) == ""


@pytest.mark.parametrize("head", [True, False])
def test_gptq_applies_to_the_listed_modules_of_each_block(head: bool) -> None:
    lists = [["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"], ["self_attn.o_proj"]]
    schemes = parsed({"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": lists, "lm_head": head})
    assert [kind_of(schemes, layer) for layer in (Q, DOWN, HEAD)] == ["int4", "", "int4" if head else ""]


def test_modelopts_mixed_precision_sets_each_layers_scheme() -> None:
    layers = {Q: {"quant_algo": "FP8"}, DOWN: {"quant_algo": "NVFP4", "group_size": 16}}
    raw = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    schemes = parsed(raw)
    assert [kind_of(schemes, layer) for layer in (Q, DOWN, HEAD, f"{Q}.x")] == ["fp8", "nvfp4", "", ""]
    with pytest.raises(ModelError, match=rf"INT4_AWQ.*supported.*{DOWN}"):
        parsed(raw | {"quantized_layers": layers | {DOWN: {"quant_algo": "INT4_AWQ"}}})
    with pytest.raises(ModelError, match="quantized_layers"):
        parsed(raw | {"quantized_layers": {}})


def test_look_ups_are_quick_when_a_config_names_each_of_many_layers() -> None:
    """A mixture's experts, each by its name: no list is looked through for each of them."""
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(40) for expert in range(250)]
    rules = tuple(Rule(name, Fp8Scheme("tensor", (0, 0), str(number))) for number, name in enumerate(names))
    schemes = Schemes(rules, tuple(f"{name}.x" for name in names[:500]))
    begin = time.process_time()
    found = [schemes.scheme_of(name) for name in names]
    assert found == [rule.scheme for rule in rules]
    assert time.process_time() - begin < 5  # 0.2 s; otherwise each of 10,000 is compared with 10,000


def test_a_dynamic_pattern_changes_only_the_fields_that_it_names() -> None:
    common = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "lm_head": True}
    schemes = parsed(
        common | {"dynamic": {".*down_proj": {"group_size": 32}, "lm_head": {"bits": 8, "desc_act": False}}}
    )
    found = [schemes.scheme_of(layer) for layer in (DOWN, Q, HEAD)]
    assert [
        (scheme.bits, scheme.group_size, scheme.act_order) for scheme in found if isinstance(scheme, IntegerScheme)
    ] == [(4, 32, True), (4, 128, True), (8, 128, False)]


@pytest.mark.parametrize(
    ("ignore", "is_ignored"),
    [
        ([DOWN], True),
        (["model.layers.3"], True),
        (["model.layers.3.mlp.down"], False),
        (["model_layers_3_mlp_down_proj", "model.layers.1", "layers.3"], False),
        (["*down*"], True),
        (["*.mlp"], False),
        (["model.layers.?.*_proj"], True),
        (["lm_head", r"re:.*(?P<a>down)_(?P<b>proj)$", r"re:(?P<a>x)"], True),
        (["re:down_proj"], False),
        ([], False),
    ],
)
def test_ignore_matches_names_prefixes_and_patterns(ignore: list[str], is_ignored: bool) -> None:
    assert (parsed(compressed([("fp8", ["Linear"])], ignore)).scheme_of(DOWN) is None) == is_ignored


def test_the_reason_for_a_layers_scheme_is_reported() -> None:
    schemes = parsed(compressed([("fp8", ["re:.*q_proj"])], ["lm_head"]))
    assert [schemes.reason_of(layer) for layer in (Q, DOWN, HEAD)] == ["target 're:.*q_proj'", "no target", "ignored"]


@pytest.mark.parametrize(
    ("locations", "is_online"),
    [([], False), (["weight_output", "weight_input"], False), (["weight_input", "input"], True), (["k_cache"], True)],
)
def test_activation_transforms_are_refused_and_weight_transforms_accepted(
    locations: list[str], is_online: bool
) -> None:
    """Of QuIP and SpinQuant, after compressed-tensors' `TransformConfig`."""
    apply = [{"targets": ["Linear"], "location": location, "inverse": False, "ignore": []} for location in locations]
    transforms = {"config_groups": {"R4": {"type": "hadamard", "apply": apply, "randomize": False}}}
    raw = compressed([("fp8", ["Linear"])], []) | {"transform_config": transforms}
    if not is_online:
        assert kind_of(parsed(raw), DOWN) == "fp8"
        return
    with pytest.raises(ModelError, match=f"R4: location = '{locations[-1]}'"):
        parsed(raw)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config_groups": {"group_0": {"targets": [], "weights": FP8}}}, ["group_0", "targets"]),
        ({"config_groups": {"group_0": {"targets": "Linear", "weights": FP8}}}, ["targets", "list of names"]),
        ({"config_groups": {"group_0": {"targets": ["re:(q"], "weights": FP8}}}, ["'(q'", "regular expression"]),
        ({"config_groups": {"group_0": {"targets": ["Embedding"], "weights": FP8}}}, ["embeddings"]),
        (
            {"config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}}},
            ["format = 'mixed-precision'", "group_0"],
        ),
        ({"config_groups": []}, ["config_groups"]),
        ({"ignore": ["re:)"]}, ["ignore", "')'", "regular expression"]),
    ],
)
def test_quantisation_groups_are_refused_when_they_cannot_be_read(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError, match="quantization_config") as raised:
        parsed(compressed([("fp8", ["Linear"])], []) | changes)
    for word in words:
        assert word in str(raised.value)
