"""The tuner of small-M GEMMs, without a GPU: which configs it tries, and the file that it writes."""

import sys

import pytest

pytest.importorskip("triton", reason="needs triton")

from mini_infer_engine.kernels.gemm.gemm_config import PdlGemmConfig
from mini_infer_engine.kernels.gemm.tuned_configs import load_tuned_configs, parse_tuned_configs
from mini_infer_engine.kernels.policy import KernelPolicy
from tests.engine.kernels.profiles import H100, H200
from tests.engine.server.dry_server import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from common import gemm_tuner as tuner


@pytest.fixture(autouse=True)
def _on_an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = KernelPolicy(H100, tuned=load_tuned_configs(H100.name))
    monkeypatch.setattr(tuner, "policy", lambda: policy)


@pytest.mark.parametrize("name", tuner.SHAPES)
@pytest.mark.parametrize("block_m", tuner.BLOCKS_M)
def test_candidates_fit_the_gpu(name: str, block_m: int) -> None:
    shape = tuner.SHAPES[name]
    found = tuner.candidates(shape, block_m)
    assert found
    for config in found:
        tile_rows = config.block_n * (2 if shape.gated else 1) + block_m
        assert config.stages * tile_rows * config.block_k * 2 <= H100.shared_memory_bytes
        tiles = -(-shape.n // config.block_n) * config.splits
        assert tiles >= H100.sm_count // 3


def test_the_file_is_this_gpus_and_keeps_what_was_not_measured() -> None:
    measured = {(64, 64, False, 8): PdlGemmConfig(64, 64, 1, 2), (64, 64, False, 16): None}
    name, text = tuner.tuned_file(measured)
    assert name == "NVIDIA_H100_80GB_HBM3.json"
    written, known = parse_tuned_configs(H100.name, text), load_tuned_configs(H200.name)
    assert written.with_pdl == {**known.with_pdl, **measured}
    assert written.portable == known.portable
