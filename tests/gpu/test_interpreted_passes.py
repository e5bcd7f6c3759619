"""Whole passes of the GPU's runner on a CPU, by Triton's interpreter: what can be known of them without a GPU.

On a GPU test_logits.py and test_same_text.py do the same with captured graphs. Here a graph is the function that it
records.
"""

import contextlib
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, and TRITON_INTERPRET=1")

from mini_infer_engine import graphs
from mini_infer_engine.batch import Batch, Row
from mini_infer_engine.graph_runner import GraphRunner
from mini_infer_engine.kernels.sample import sample
from mini_infer_engine.layers import decoder, linear
from tests.gpu.device import INTERPRETED
from tests.gpu.runs import make_runner, make_settings
from tests.support.tiny_models import GREEDY, PageDealer, chunk, reference_logits, run_chunks, save_tiny_model

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="runs under TRITON_INTERPRET=1 without a GPU only")
TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(40)]


def prompt(slot: int, start: int, count: int, pages: list[int]) -> Row:
    return chunk(slot, TOKENS, start, count, pages, sampling=GREEDY)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_passes_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    model = save_tiny_model(tmp_path, architecture, num_hidden_layers=2)
    for module in (linear, decoder):  # a CPU's runner would give the weights up for copies in another order
        monkeypatch.setattr(module, "blocked_weight", lambda weight: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    settings = make_settings(
        tmp_path, device="cpu", enforce_eager=True, page_size=16, kv_cache_memory=1 << 23, attention_backend="triton"
    )
    runner = make_runner(settings)
    assert isinstance(runner, GraphRunner)
    expected = reference_logits(model, TOKENS)
    best = expected.argmax(-1).tolist()
    dealer = PageDealer(runner)

    actual = run_chunks(runner, TOKENS, dealer.table(40), [13, 1, 1, 25])
    assert (actual - expected).abs().max() <= 3e-4

    runner.graph_memory = None
    runner.decode_slots = torch.full((2,), runner.table.spare_slot, dtype=torch.int32)
    pages, others = dealer.table(48), dealer.table(48)
    with torch.inference_mode():
        graph = graphs.PrefillGraph(runner, 32, 0)
        graph.load([], [prompt(3, 0, 20, pages), prompt(5, 0, 7, others)])
        graph._run()
        last_tokens = runner.table.state.last_tokens
        assert last_tokens[[3, 5]].tolist() == [best[19], best[6]]
        graph.load([], [prompt(3, 20, 10, pages)])
        graph._run()
        assert last_tokens[3] == best[29]

        decode = graphs.DecodeGraph(runner, 2)
        runner.decode_slots[0] = 3
        runner.table.send_pages([Row(3, 30, 1, None, pages, GREEDY)], runner.page_size)
        last_tokens[3] = TOKENS[30]
        decode._run_forward()
        sample(decode.logits, decode.slots, runner.table.state)
        assert last_tokens[3] == best[30]

        last_tokens[3] = TOKENS[31]
        mixed = [Row(3, 31, 1, None, pages, GREEDY), prompt(5, 7, 5, others)]
        runner.table.begin(mixed[1:])
        runner._eager(Batch(mixed, 1))
        assert last_tokens[[3, 5]].tolist() == [best[31], best[11]]

        last_tokens[3], last_tokens[5] = TOKENS[32], TOKENS[12]
        decodes = [Row(3, 32, 1, None, pages, GREEDY), Row(5, 12, 1, None, others, GREEDY)]
        runner.table.forget_pages(mixed[1:])
        graph = graphs.PrefillGraph(runner, 48, 4)
        third = dealer.table(48)
        graph.load(decodes, [prompt(1, 0, 18, third), prompt(2, 0, 9, dealer.table(48))])
        graph._run()
        assert last_tokens[[3, 5, 1, 2]].tolist() == [best[32], best[12], best[17], best[8]]
        last_tokens[5] = TOKENS[13]
        graph.load([Row(5, 13, 1, None, others, GREEDY)], [prompt(1, 18, 20, third)])
        graph._run()
        assert last_tokens[[5, 1]].tolist() == [best[13], best[37]]
