"""Keys and values in one byte an element: rounding, pages, attention over them, and what may be asked for."""

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.batch import Batch, PageCopy, PageSwap, Row, Transfers
from mini_infer_engine.kv_transfer.transports.shared_memory import HostMemory
from mini_infer_engine.layers.attention import Attention
from mini_infer_engine.models.kv_spec import FP8, INT8, KVQuantization, KVSpec
from mini_infer_engine.runtime.attention.torch_reference import TorchAttention
from mini_infer_engine.runtime.inputs.batch_tensors import build_inputs
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from mini_infer_engine.runtime.memory.kv_rows import dequantize_rows, quantize_rows
from mini_infer_engine.runtime.memory.kv_storage import kv_quantization_of
from mini_infer_engine.runtime.memory.quantized_pool import QuantizedKVPool, make_pool
from tests.engine.runtime.test_kv_pool_and_attention import config, naive
from tests.support.tiny_models import GREEDY, run_chunks, save_tiny_model, tiny_runner

CPU = torch.device("cpu")
KINDS = pytest.mark.parametrize("kind", [FP8, INT8], ids=lambda kind: kind.name)


def spec_of(kind: KVQuantization, **changes: Any) -> KVSpec:
    values = {"num_layers": 2, "page_size": 16, "num_kv_heads": 2, "head_dim": 8, "dtype": torch.float32}
    return KVSpec(**(values | changes), quantization=kind)


def pool_of(kind: KVQuantization, num_pages: int = 12, **changes: Any) -> QuantizedKVPool:
    """With random pages."""
    pool = make_pool(spec_of(kind), num_pages, CPU, **changes)
    assert isinstance(pool, QuantizedKVPool)
    values, scales = quantize_rows(torch.randn(pool.pages.shape), kind)
    pool.pages.copy_(values)
    pool.scales.copy_(scales.transpose(-1, -2))
    return pool


def read(pool: QuantizedKVPool) -> torch.Tensor:
    """[pages, layers, 2, page_size, kv_heads, head_dim]."""
    return dequantize_rows(pool.pages, pool.scales.transpose(-1, -2), torch.float32)


@pytest.mark.parametrize(("kind", "error"), [(FP8, 2**-4), (INT8, 0.51 / 127)])
@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 3e4])
def test_kv_quantisation_error_is_within_the_format(kind: KVQuantization, error: float, size: float) -> None:
    """Of e4m3 half a step of three bits; of integers half a step of the largest element, which scales enlarge a bit."""
    torch.manual_seed(0)
    x = torch.randn(200, 3, 64) * size
    x[:5] = 0
    x[5, 0, 0] = 1e6 * size  # an outlier leaves the others small
    values, scales = quantize_rows(x, kind)
    assert (values.dtype, scales.dtype, scales.shape) == (kind.dtype, torch.bfloat16, (200, 3))
    largest = x.abs().amax(-1, keepdim=True)
    step = x.abs() * error + largest / kind.largest * 2**-9 if kind is FP8 else largest * error * (1 + 2**-7)
    assert ((dequantize_rows(values, scales, torch.float32) - x).abs() <= step + 1e-37).all()
    assert float(values.float().abs().max()) <= kind.largest
    assert not values[:5].float().any()
    again = quantize_rows(dequantize_rows(values, scales, torch.float32)[6:], kind)[0]
    assert (again.float() - values[6:].float()).abs().max() <= 1  # what was rounded hardly moves


@KINDS
def test_quantised_pages_take_half_the_bytes_plus_scales(kind: KVQuantization) -> None:
    spec = KVSpec(28, 128, 4, 128, torch.bfloat16, quantization=kind)
    plain = KVSpec(28, 128, 4, 128, torch.bfloat16)
    assert spec.page_bytes == plain.page_bytes // 2 + 28 * 2 * 128 * 4 * 2
    assert plain.page_bytes / spec.page_bytes > 1.96
    pool = make_pool(spec_of(kind), 5, CPU)
    assert pool.storage.nbytes == 6 * pool.spec.page_bytes
    assert not pool.storage.any()
    layout = pool.memory().layout
    assert (layout.page_bytes, layout.layer_bytes) == (pool.spec.page_bytes, pool.spec.page_bytes // 2)
    assert type(make_pool(plain, 1, CPU)) is KVPool


@KINDS
@pytest.mark.parametrize("most_bytes", [0, 10**9], ids=["gathered", "copied"])
@pytest.mark.parametrize("window", [None, 5])
def test_attention_equals_that_over_quantised_keys_and_values(
    window: int | None, most_bytes: int, kind: KVQuantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the same pass among them: a chunk sees its own tokens as later ones will."""
    monkeypatch.setattr("mini_infer_engine.runtime.attention.running_copy.MOST_BYTES", most_bytes)
    torch.manual_seed(0)
    pool = pool_of(kind)
    tables = [[7, 2, 0], [9], [1, 11, 4], [3]]
    rows = [
        Row(0, 34, 1, None, tables[0], GREEDY),
        Row(1, 3, 1, [0], tables[1], GREEDY),
        Row(2, 20, 14, [0] * 14, tables[2], None),
        Row(3, 0, 6, [0] * 6, tables[3], None),
    ]
    inputs = build_inputs(Batch(rows, 2), 16, pool.null_page, CPU)
    layers = [Attention(config(sliding_windows=(None, window)), layer) for layer in range(2)]
    q, kv = torch.randn(22, 4, 8), torch.randn(22, 2, 2, 8)
    before = read(pool)
    actual = TorchAttention(layers, pool).prepare(inputs, None).attend_rotated(q, kv, layers[1])

    new, begin = dequantize_rows(*quantize_rows(kv, kind), torch.float32), 0
    for row, table in zip(rows, tables, strict=True):
        tokens, end = slice(begin, begin + row.count), row.start + row.count
        stored = before[table, 1].transpose(0, 1).flatten(1, 2)
        stored[:, row.start : end] = new[tokens].transpose(0, 1)
        expected = naive(q[tokens], stored[0, :end], stored[1, :end], row.start, window)
        assert torch.allclose(actual[tokens], expected, atol=1e-5)
        before[table, 1] = stored.unflatten(1, (len(table), 16)).transpose(0, 1)
        begin += row.count
    assert torch.equal(read(pool), before)


@KINDS
def test_copied_and_swapped_pages_keep_their_scales(kind: KVQuantization) -> None:
    pool = pool_of(kind, 4, num_host_pages=2)
    before = read(pool)
    pool.transfer(Transfers(copies=[PageCopy(0, 2, 5)]))
    before[2, :, :, :5] = before[0, :, :, :5]
    assert torch.equal(read(pool), before)
    pool.transfer(Transfers(swap_out=[PageSwap(1, 0)]))
    pool.storage[1].zero_()
    pool.transfer(Transfers(swap_in=[PageSwap(3, 0)]))
    assert torch.equal(read(pool)[3], before[1])


@KINDS
def test_logits_are_unchanged_by_chunks_with_quantised_kv(tmp_path: Path, kind: KVQuantization) -> None:
    """A model's logits of one prompt, whole and in chunks that end within pages, are the same.

    Sums of fp32 differ by their order, and where that changes a rounded element some logits show it.
    """
    save_tiny_model(tmp_path, "qwen3")
    tokens = [(position * 37 + 11) % 190 + 5 for position in range(40)]

    def logits_in_chunks(*lengths: int) -> torch.Tensor:
        runner = tiny_runner(tmp_path, kv_cache_dtype=kind.name)
        assert runner.pool.spec.quantization is kind
        return run_chunks(runner, tokens, [3, 1, 2], list(lengths))

    whole = logits_in_chunks(40)
    chunked = logits_in_chunks(7, 1, 16, 15, 1)
    plain = run_chunks(tiny_runner(tmp_path), tokens, [3, 1, 2], [40])
    assert 1e-4 < (plain - whole).abs().mean() < 0.2 * plain.abs().mean()
    assert (chunked - whole).abs().mean() < 0.05 * (plain - whole).abs().mean()


def test_kv_cache_dtype_is_chosen_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(name: str, checkpoint: str | None = None, device: str = "cpu", **settings: Any) -> KVQuantization | None:
        model, heads = settings.pop("architecture", "LlamaForCausalLM"), settings.pop("heads", {})
        requested = EngineSettings(model="m", kv_cache_dtype=name, **settings)  # type: ignore[arg-type]  # any name
        described = config(architecture=model, kv_cache_dtype=checkpoint, **heads)
        return kv_quantization_of(requested, described, torch.device(device))

    assert [chosen(name) for name in ("auto", "fp8", "fp8_e4m3", "int8")] == [None, FP8, FP8, INT8]
    assert chosen("auto", "fp8") is FP8
    assert chosen("int8", "fp8") is INT8
    with pytest.raises(ModelError, match=r"'flash'.*'triton'"):
        chosen("fp8", attention_backend="flash")
    assert chosen("auto", "fp8", attention_backend="flash") is None
    with pytest.raises(ModelError, match="caches latents"):
        chosen("int8", architecture="DeepseekV2ForCausalLM")
    with pytest.raises(ModelError, match=r"71 query heads.*32"):
        chosen("int8", device="cuda", heads={"num_heads": 71, "num_kv_heads": 1})
    assert chosen("int8", heads={"num_heads": 71, "num_kv_heads": 1}) is INT8


@pytest.mark.parametrize("kind", [None, FP8], ids=["plain", "fp8"])
def test_a_shared_kv_pool_is_mapped_by_others(kind: KVQuantization | None) -> None:
    spec = replace(spec_of(FP8), quantization=kind)
    pool = make_pool(spec, 3, CPU, is_shared=True)
    pool.storage.view(torch.uint8)[2] = 7
    memory = pool.memory()
    shared = HostMemory(memory)
    mapping = shared.open(shared.shared)
    page_bytes = memory.layout.page_bytes
    there = (ctypes.c_uint8 * memory.size).from_address(mapping.address)
    assert bytes(there[2 * page_bytes : 3 * page_bytes]) == b"\7" * page_bytes
    assert not any(there[: 2 * page_bytes])
    assert make_pool(spec, 3, CPU).memory().file is None
