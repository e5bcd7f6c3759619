"""What is tuned for a model, where the table goes and how engines read it: all that needs no GPU."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from mini_infer_engine.config.parallelism.tensor_parallel import TensorParallel
from mini_infer_engine.kernels.gemm import tuned_configs
from mini_infer_engine.kernels.gemm.gemm_config import PdlGemmConfig
from mini_infer_engine.kernels.gemm.tuned_configs import cached_configs, load_tuned_configs, packaged_configs
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.tools.tuning import command
from mini_infer_engine.tools.tuning.checkpoints import CHECKPOINTS
from mini_infer_engine.tools.tuning.products import Product, products_of
from tests.support import fp8_checkpoints, integer_checkpoints
from tests.support.tiny_models import DEEPSEEK, save_tiny_model

DEVICE = "NVIDIA H200"
CONFIG = PdlGemmConfig(64, 128, 1, 3)
integers = partial(integer_checkpoints.quantize_folder, name="gptq")
fp8 = partial(fp8_checkpoints.quantize_folder, form="compressed-channel")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuned_configs.load_tuned_configs.cache_clear()
    yield
    tuned_configs.load_tuned_configs.cache_clear()


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("qwen3", {}), ("llama", {"tie_word_embeddings": True}), ("gemma2", {"head_dim": 16}), ("phi3", {})],
)
def test_gemm_shapes_of_a_model(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    from mini_infer_engine.tools.tuning.checkpoints import CheckpointShape

    save_tiny_model(
        tmp_path,
        architecture,
        **({"original_max_position_embeddings": 512} if architecture == "phi3" else {}) | changes,
    )
    config = read_config(tmp_path)
    shape = CheckpointShape(
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.vocab_size,
        config.num_layers,
        is_gated=config.activation == "silu",
    )
    assert products_of(config) == shape.products


def test_gemm_shapes_of_a_tensor_parallel_rank(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")  # width 64, MLP 96, 4 heads of 24 with 2 for keys and values, 199 tokens
    found = products_of(replace(read_config(tmp_path), tensor_parallel=TensorParallel(1, 2)))
    assert found == {
        Product((2 + 2) * 24, 64): 3,
        Product(64, 48): 6,  # o_proj of 2 heads of 24, and down_proj
        Product(48, 64, gated=True): 3,
        Product(128, 64): 1,
    }


def test_gemm_shapes_of_latent_attention_exclude_experts(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "deepseek_v2", **DEEPSEEK)
    found = products_of(read_config(tmp_path))
    assert found[Product(4 * (24 + 16) + 32 + 16, 64)] == 3
    assert found[Product(6, 64)] == 2  # the routers
    assert found[Product(96, 64, gated=True)] == 1  # of the one dense layer


@pytest.mark.parametrize("quantize", [integers, fp8], ids=["gptq", "fp8"])
def test_gemm_shapes_exclude_quantised_weights(quantize: Any, tmp_path: Path, capsys: Any) -> None:
    save_tiny_model(tmp_path, "llama", head_dim=16)
    quantize(tmp_path)
    assert products_of(read_config(tmp_path)) == {Product(199, 64): 1}, "the output layer alone is not quantised"
    command._models(command.make_parser().parse_args(["--model", str(tmp_path)]))
    assert "left out, 1 products of a step are not" in capsys.readouterr().out


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tuned_shapes_are_those_of_the_ranks_shard(ranks: int, tmp_path: Path) -> None:
    from mini_infer_engine.tools.tuning.checkpoints import CheckpointShape

    save_tiny_model(tmp_path, "qwen3", num_key_value_heads=2, vocab_size=200)
    options = command.make_parser().parse_args(["--model", str(tmp_path), "-tp", str(ranks)])
    shape = CheckpointShape(64, 96, 4, 2, 24, 200, 3)
    assert command._models(options) == {str(tmp_path): shape.of_rank(ranks).products}


def test_the_table_has_twenty_checkpoints() -> None:
    assert len(CHECKPOINTS) == 20
    assert CHECKPOINTS["Qwen2.5-7B"].products[Product(18944, 3584, gated=True)] == 28


def test_locally_tuned_configs_override_the_packaged_table() -> None:
    packaged = packaged_configs(DEVICE)
    known = next(iter(packaged.with_pdl))
    assert load_tuned_configs(DEVICE) == packaged
    assert packaged.origin == DEVICE
    tuned_configs.load_tuned_configs.cache_clear()
    command.write_table(DEVICE, {known: CONFIG}, None)
    place = command.write_table(DEVICE, {(7, 64, False, 8): None}, None)
    found = load_tuned_configs(DEVICE)
    assert found.with_pdl == {**packaged.with_pdl, known: CONFIG, (7, 64, False, 8): None}
    assert found.portable == packaged.portable
    assert found.origin == f"{DEVICE} and 2 of {place.parent}"


def test_a_table_to_ship_has_local_and_packaged_configs(tmp_path: Path) -> None:
    place = command.write_table(DEVICE, {(7, 64, False, 8): CONFIG}, tmp_path / "out")
    text = place.read_text()
    made = tuned_configs.parse_tuned_configs(DEVICE, text)
    assert made.with_pdl == {**packaged_configs(DEVICE).with_pdl, (7, 64, False, 8): CONFIG}
    assert cached_configs(DEVICE) is None


@pytest.mark.parametrize("text", ["", "{}", '{"with_pdl": [{}]}', "[1]"])
def test_a_table_is_reported_and_left_out_when_it_is_broken(text: str, caplog: pytest.LogCaptureFixture) -> None:
    place = command.write_table(DEVICE, {(7, 64, False, 8): CONFIG}, None)
    place.write_text(text)
    assert load_tuned_configs(DEVICE) == packaged_configs(DEVICE)
    assert str(place) in caplog.text


def test_tuning_exits_with_the_reason_when_there_is_no_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--checkpoints"]) == 1
    assert "no NVIDIA GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main([])
    with pytest.raises(SystemExit):
        command.main(["--checkpoints", "--rows", "7"])


def test_tuning_gains_count_whole_steps() -> None:
    pytest.importorskip("triton")
    from mini_infer_engine.tools.tuning.small_m_tuner import Measured

    shape = CHECKPOINTS["Qwen2.5-7B"]
    measured = {
        (product, 8): Measured(product, 8, before_us=2.0, us=1.0, config=CONFIG, all_us=())
        for product in shape.products
    }
    [line] = command.gains({"Qwen2.5-7B": shape.products}, measured, (8, 32))
    assert line == "Qwen2.5-7B, up to 8 rows: 5 of 5 products of a step, 0.226 -> 0.113 ms (50.0% less)"
    assert asdict(next(iter(measured.values())))["us"] == 1.0


def test_tuning_candidates_fit_the_gpu() -> None:
    pytest.importorskip("triton")
    from mini_infer_engine.tools.tuning.small_m_tuner import BLOCKS_M, candidates
    from tests.engine.kernels.profiles import H100

    products = {product for shape in CHECKPOINTS.values() for product in shape.products}
    for product in products:
        for block_m in BLOCKS_M:
            found = candidates(product, block_m, H100)
            assert found, (product, block_m)
            for config in found:
                tile_rows = config.block_n * (2 if product.gated else 1) + block_m
                assert config.stages * tile_rows * config.block_k * 2 <= H100.shared_memory_bytes


def test_tuning_is_fair_to_the_first_candidates_when_the_gpu_clocks_up_late() -> None:
    pytest.importorskip("triton")
    from mini_infer_engine.tools.tuning.small_m_tuner import candidate_times

    times = {PdlGemmConfig(64, 128, splits, 3): 10.0 + splits for splits in (1, 2, 3, 4, 6)}
    calls: list[PdlGemmConfig] = []

    def microseconds(config: PdlGemmConfig) -> float:
        if config.splits == 2:
            raise RuntimeError("it does not fit")
        calls.append(config)
        return times[config] * (1.2 if len(calls) <= 2 else 1.0)

    found = candidate_times(list(times), microseconds)
    assert [(us, config.splits) for us, config in found] == [(11.0, 1), (13.0, 3), (14.0, 4), (16.0, 6)]
