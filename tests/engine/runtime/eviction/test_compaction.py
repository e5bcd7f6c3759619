"""Pages after a compaction: each head has its own tokens, in order, whatever pages they come from and go to."""

from dataclasses import replace

import pytest
import torch

from mini_infer_engine.models.kv_spec import KV_QUANTIZATIONS, KVSpec
from mini_infer_engine.runtime.memory import kv_pool
from mini_infer_engine.runtime.memory.quantized_pool import make_pool

SPEC = KVSpec(num_layers=3, page_size=16, num_kv_heads=2, head_dim=8, dtype=torch.float32)
CPU = torch.device("cpu")


@pytest.mark.parametrize("quantization", [None, "fp8", "int8"])
@pytest.mark.parametrize("target", [[6, 7], [0, 3]], ids=["other pages", "own pages"])
@pytest.mark.parametrize("most_bytes", [1, 1 << 20], ids=["layer by layer", "at once"])
def test_each_head_keeps_its_tokens_when_a_cache_is_compacted(
    quantization: str | None, target: list[int], most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_pool, "_MOST_COPIED_BYTES", most_bytes)
    kind = None if quantization is None else KV_QUANTIZATIONS[quantization]
    pool = make_pool(replace(SPEC, quantization=kind), 8, CPU)
    torch.manual_seed(1)
    source = torch.tensor([3, 0, 5])
    places = torch.arange(40)
    for rows in pool.token_rows_of(source[places // 16], places % 16):
        pool.write(rows, torch.randn(40, 2, 2, 8))
    pool.attention_sums = torch.rand(9, 3, 1, 2, 16)
    before, sums = tokens_of(pool, source), pool.read_sums(source)
    kept = torch.stack([torch.stack([torch.randperm(40)[:20].sort().values for _ in range(2)]) for _ in range(3)])
    pool.compact(kept, source, torch.tensor(target))
    after = tokens_of(pool, torch.tensor(target))
    for layer in range(3):
        for head in range(2):
            assert torch.equal(after[layer][:, :20, head], before[layer][:, kept[layer, head], head])
    assert torch.equal(pool.read_sums(torch.tensor(target))[..., :20], sums.gather(2, kept))
    untouched = [page for page in source.tolist() if page not in target]
    assert all(torch.equal(tokens_of(pool, torch.tensor([page]))[0][0], before[0][0][16 * place : 16 * place + 16])
               for place, page in enumerate(source.tolist()) if page in untouched)  # fmt: skip


def test_keys_are_read_as_attention_reads_them() -> None:
    for quantization in (None, *KV_QUANTIZATIONS.values()):
        pool = make_pool(replace(SPEC, quantization=quantization), 4, CPU)
        rows = pool.token_rows_of(torch.tensor([2] * 16 + [1] * 16), torch.arange(32) % 16)
        for of_layer in rows:
            pool.write(of_layer, torch.randn(32, 2, 2, 8))
        pages = torch.tensor([2, 1])
        for layer in range(3):
            assert torch.equal(pool.read_keys(layer, pages), tokens_of(pool, pages)[layer][0])


def tokens_of(pool: kv_pool.KVPool, pages: torch.Tensor) -> list[torch.Tensor]:
    """Returns keys and values of each layer, [2, tokens, kv_heads, head_dim]."""
    return [torch.cat([x.clone() for x in pool.gather(rows, 1)]) for rows in pool.gather_rows(pages)]


def test_sums_of_attention_go_on_where_a_token_has_some() -> None:
    pool = make_pool(SPEC, 4, CPU)
    pool.attention_sums = torch.full((5, 3, 1, 2, 16), 7.0)  # what another sequence has left
    pages, first, second = torch.tensor([2, 0]), torch.rand(2, 20), torch.rand(2, 25)
    pool.add_sums(1, pages, first, 0)
    pool.add_sums(1, pages, second, 20)
    expected = second + torch.nn.functional.pad(first, (0, 5))
    assert torch.equal(pool.read_sums(pages)[1, :, :25], expected)
    assert pool.read_sums(torch.tensor([1, 3])).unique().tolist() == [7.0]
    assert pool.read_sums(pages)[0].unique().tolist() == [7.0]
