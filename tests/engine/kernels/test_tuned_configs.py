"""The files of measured tile configs: they are packaged, hold what they say, and survive being written again."""

import json
from importlib import resources

import pytest

from mini_infer_engine.kernels.gemm.gemm_config import LargeMConfig, PdlGemmConfig, SmallMConfig
from mini_infer_engine.kernels.gemm.tuned_configs import (
    TunedConfigs,
    load_tuned_configs,
    parse_tuned_configs,
    rows_of_large_m,
    tuned_configs_json,
)

FILES = [
    file
    for file in (resources.files("mini_infer_engine.kernels.gemm") / "configs").iterdir()
    if file.name.endswith(".json")
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_packaged_file_is_valid_and_stays_as_it_is_when_written_again(file: resources.abc.Traversable) -> None:
    text = file.read_text()
    device = json.loads(text)["device"]
    assert file.name == f"{device.replace(' ', '_')}.json"
    configs = parse_tuned_configs(device, text)
    assert tuned_configs_json(configs) == text
    for (n, k, gated, m), config in configs.with_pdl.items():
        assert m in (8, 16, 32, 64), (n, k, gated)
        if isinstance(config, PdlGemmConfig):
            assert config.block_n in ((32, 64) if gated else (64, 128))
            assert config.block_k % 64 == 0
            assert config.stages >= 2


def test_a_gpu_uses_the_h200s_configs_when_it_has_no_file() -> None:
    assert load_tuned_configs("NVIDIA H100 80GB HBM3") is not None
    assert load_tuned_configs("NVIDIA H100 80GB HBM3").device == "NVIDIA H200"


def test_tuned_configs_survive_writing_and_reading() -> None:
    configs = TunedConfigs(
        "NVIDIA X",
        {(64, 64, True, 8): PdlGemmConfig(32, 128, 1, 2), (64, 64, False, 64): SmallMConfig(64, 64, 0, 4, 3)},
        {(64, 64, False, 16): None},
        {
            ("int4", 64, 64, True, 8): PdlGemmConfig(32, 128, 1, 2),
            ("fp8", 64, 64, False, 8): PdlGemmConfig(64, 256, 2, 3),
        },
        {
            ("int4", 64, 128, 256): LargeMConfig(128, 128, 2, 4),
            ("int4", 64, 128, 512): LargeMConfig(128, 128, 2, 4, splits_last_wave=True),
            ("int8", 64, 128, 4096): None,
        },
    )
    assert parse_tuned_configs("NVIDIA X", tuned_configs_json(configs)) == configs


def test_rows_are_rounded_up_to_the_next_measured_count() -> None:
    assert [rows_of_large_m(m) for m in (65, 128, 129, 1024, 5000)] == [128, 128, 256, 1024, 4096]


@pytest.mark.parametrize(
    ("table", "kernel", "message"),
    [
        ("large_m", {"kernel": "pdl_gemm", "format": "int8"}, "unknown kernel 'pdl_gemm'"),
        ("with_pdl", {"kernel": "magic"}, "unknown kernel 'magic'"),
        (
            "portable",
            {"kernel": "pdl_gemm", "config": {"block_n": 64, "block_k": 64, "splits": 1, "stages": 2}},
            "needs pdl_gemm",
        ),
    ],
)
def test_loading_tuned_configs_raises_when_the_file_is_invalid(
    table: str, kernel: dict[str, object], message: str
) -> None:
    entry = {"N": 64, "K": 64, "gated": False, "M": 8, **kernel}
    text = json.dumps({"device": "NVIDIA X", "with_pdl": [], "portable": [], "quantized": []} | {table: [entry]})
    with pytest.raises(ValueError, match=message):
        parse_tuned_configs("NVIDIA X", text)
