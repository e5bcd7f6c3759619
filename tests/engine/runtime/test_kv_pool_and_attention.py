"""The page pool's addresses, the page copies, and which backend is chosen."""

from typing import Any

import pytest
import torch

from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.model.rope import RopeParameters
from mini_infer_engine.core.batch import Batch, PageCopy, PageSwap, Row, Transfers
from mini_infer_engine.layers.attention import Attention
from mini_infer_engine.models.kv_spec import KVSpec
from mini_infer_engine.runtime.attention.torch_reference import TorchAttention
from mini_infer_engine.runtime.inputs.batch_tensors import build_inputs
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from tests.support.tiny_models import GREEDY

CPU = torch.device("cpu")
SPEC = KVSpec(num_layers=2, page_size=16, num_kv_heads=2, head_dim=8, dtype=torch.float32)


def config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 10,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "ropes": (RopeParameters(), RopeParameters()),
        "attention_scale": 8**-0.5,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "sliding_windows": (None, None),
        "dtype": "float32",
        "eos_token_ids": (),
        "bos_token_id": None,
    }
    return ModelConfig(**(values | changes))


def naive(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, window: int | None) -> torch.Tensor:
    """One sequence, one query token and head at a time; q [count, heads, dim], keys and values [end, kv_heads, dim]."""
    group = q.shape[1] // keys.shape[1]
    out = torch.empty_like(q)
    for token in range(q.shape[0]):
        end = start + token + 1
        first = 0 if window is None else max(0, end - window)
        for head in range(q.shape[1]):
            scores = keys[first:end, head // group] @ q[token, head] / q.shape[2] ** 0.5
            out[token, head] = scores.softmax(0) @ values[first:end, head // group]
    return out.flatten(1)


@pytest.mark.parametrize("most_bytes", [0, 10**9], ids=["gathered", "copied"])
@pytest.mark.parametrize("window", [None, 5, 40])
def test_torch_attention_equals_its_definition_and_writes_only_its_tokens(
    window: int | None, most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mini_infer_engine.runtime.attention.running_copy.MOST_BYTES", most_bytes)
    torch.manual_seed(0)
    pool = KVPool(SPEC, 12, CPU)
    pool.pages.normal_()
    tables = [[7, 2, 0], [9], [1, 11, 4]]
    rows = [
        Row(0, 34, 1, None, tables[0], GREEDY),
        Row(1, 3, 1, [0], tables[1], GREEDY),
        Row(2, 20, 14, [0] * 14, tables[2], None),
    ]
    inputs = build_inputs(Batch(rows, 2), 16, pool.null_page, CPU)
    layers = [Attention(config(sliding_windows=(None, window)), layer) for layer in range(2)]
    backend = TorchAttention(layers, pool)
    q, k, v = torch.randn(16, 4, 8), torch.randn(16, 2, 8), torch.randn(16, 2, 8)
    before = pool.pages.clone()
    actual = backend.prepare(inputs, None).attend_rotated(q, torch.stack((k, v), 1), layers[1])

    begin = 0
    for row, table in zip(rows, tables, strict=True):
        tokens = slice(begin, begin + row.count)
        end = row.start + row.count
        stored = before[table, 1].transpose(0, 1).flatten(1, 2)  # [2, tokens of the pages, kv_heads, head_dim]
        stored[0, row.start : end], stored[1, row.start : end] = k[tokens], v[tokens]
        expected = naive(q[tokens], stored[0, :end], stored[1, :end], row.start, window)
        assert torch.allclose(actual[tokens], expected, atol=1e-5)
        before[table, 1] = stored.unflatten(1, (len(table), 16)).transpose(0, 1)
        begin += row.count
    assert torch.equal(pool.pages, before)


def test_a_page_copy_copies_only_the_first_tokens_of_all_layers() -> None:
    pool = KVPool(SPEC, 4, CPU)
    pool.pages.normal_()
    before = pool.pages.clone()
    pool.transfer(Transfers(copies=[PageCopy(0, 2, 5), PageCopy(2, 3, 3)]))
    before[2, :, :, :5] = before[0, :, :, :5]
    before[3, :, :, :3] = before[0, :, :, :3]
    assert torch.equal(pool.pages, before)


def test_swapped_pages_are_restored_after_others_used_their_place() -> None:
    """What leaves is read before what comes back, and that before copies on the device."""
    pool = KVPool(SPEC, 4, CPU, num_host_pages=2)
    pool.pages.normal_()
    first, second = pool.pages[1].clone(), pool.pages[2].clone()
    pool.transfer(Transfers(swap_out=[PageSwap(1, 0), PageSwap(2, 1)]))
    pool.pages.normal_()
    third = pool.pages[3].clone()
    transfers = Transfers(swap_out=[PageSwap(3, 1)], swap_in=[PageSwap(3, 0)], copies=[PageCopy(3, 0, 16)])
    pool.transfer(transfers)
    assert torch.equal(pool.pages[3], first)
    assert torch.equal(pool.pages[0], first)
    assert torch.equal(pool.host_pages[1], third.flatten())
    assert not torch.equal(pool.host_pages[1], second.flatten())


def test_a_new_kv_pool_is_zero_and_has_a_null_page() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        pool = KVPool(KVSpec(2, 32, 2, 8, dtype), 5, CPU)
        assert pool.pages.shape == (6, 2, 2, 32, 2, 8)
        assert pool.pages.nbytes == 6 * pool.spec.page_bytes
        assert not pool.pages.any()
        assert pool.null_page == 5
