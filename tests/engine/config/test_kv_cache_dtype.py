"""How a checkpoint wants keys and values kept, by its config.json."""

from pathlib import Path
from typing import Any

import pytest

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.quantization.checkpoint import parse_kv_cache_dtype, parse_quantization


def fields_of(**quantization: Any) -> Fields:
    return Fields(Path("config.json"), {"quantization_config": {"quant_method": "compressed-tensors"} | quantization})


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ({"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}, "fp8"),
        ({"num_bits": 8, "type": "int"}, "int8"),
        ({"num_bits": 4, "type": "float"}, None),
        (None, None),
    ],
)
def test_kv_cache_dtype_is_read_from_kv_cache_scheme(scheme: dict[str, Any] | None, expected: str | None) -> None:
    assert parse_kv_cache_dtype(fields_of(kv_cache_scheme=scheme)) == expected
    assert parse_kv_cache_dtype(Fields(Path("config.json"), {})) is None


def test_weights_are_unquantised_when_only_kv_cache_scheme_is_given() -> None:
    fields = fields_of(kv_cache_scheme={"num_bits": 8, "type": "float"}, config_groups={})
    assert parse_quantization(fields) is None


def test_kv_cache_dtype_is_fp8_when_autofp8_says_static() -> None:
    raw = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}
    assert parse_kv_cache_dtype(Fields(Path("config.json"), {"quantization_config": raw})) == "fp8"
    assert (
        parse_kv_cache_dtype(Fields(Path("config.json"), {"quantization_config": raw | {"kv_cache_scheme": None}}))
        is None
    )
