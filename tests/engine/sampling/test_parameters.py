import math
import struct
from typing import Any

import pytest

from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.sampling.parameters import DEVICE_FORMAT, DEVICE_PARAMETERS, PARAMETERS, out_of_range


def test_the_parameter_table_has_every_sampling_parameter_with_an_allowed_default() -> None:
    names = [row.name for row in PARAMETERS]
    assert sorted(names) == sorted(SamplingParams.__struct_fields__)
    assert out_of_range(SamplingParams()) is None


@pytest.mark.parametrize("row", [row for row in PARAMETERS if row.allowed is not None], ids=lambda row: row.name)
def test_a_parameters_range_includes_its_ends_only(row: Any) -> None:
    low, high = row.allowed.low, row.allowed.high
    allowed = [low + 0.5] if row.allowed.above else [low]
    beyond = [low if row.allowed.above else low - 1, math.nan, math.inf, -math.inf]
    if high < math.inf:
        allowed.append(high)
        beyond.append(high + 1)
    for value in allowed:
        assert out_of_range(SamplingParams(**{row.name: value})) is None
    for value in beyond:
        found = out_of_range(SamplingParams(**{row.name: value}))
        assert found is not None
        assert found[0] == row.name
        assert found[1].startswith(f"{row.name} is {value}; it must be ")


def test_a_slots_packet_has_the_fields_that_the_kernel_reads() -> None:
    """`STATE_FIELDS` of the update kernel: inverse temperature, top-k, top-p, min-p, eight bytes each."""
    params = SamplingParams(temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1)
    packed = struct.pack(f"<{DEVICE_FORMAT}", *[form.value(getattr(params, name)) for name, form in DEVICE_PARAMETERS])
    assert packed == struct.pack("<dq2d", 2.0, 0, 0.9, 0.1)
    assert [form.value(0.0) for name, form in DEVICE_PARAMETERS if name == "temperature"] == [0.0]
    assert [form.neutral for _, form in DEVICE_PARAMETERS] == [0.0, 0, 1.0, 0.0]
