"""Whole passes of the GPU's runner on a CPU, by Triton's interpreter: what can be known of them without a GPU.

On a GPU test_logits.py and test_same_text.py do the same with captured graphs. Here a graph is the function that it
records.
"""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

pytest.importorskip("triton", reason="needs triton, and TRITON_INTERPRET=1")

from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.kernels.sampling.sample import sample
from mini_infer_engine.layers import decoder, linear
from mini_infer_engine.runtime import cuda_graphs as graphs
from mini_infer_engine.runtime.graph_runner import GraphRunner
from mini_infer_engine.runtime.runner import TorchRunner
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
    runner.decode_slots = torch.full((2,), runner.table.padding_slot, dtype=torch.int32)
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
        sample(
            decode.logits,
            decode.slots,
            runner.table.state,
            workspace=runner.workspace,
            programs=runner.policy.sample_programs,
        )
        assert last_tokens[3] == best[30]

        last_tokens[3] = TOKENS[31]
        mixed = [Row(3, 31, 1, None, pages, GREEDY), prompt(5, 7, 5, others)]
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


@pytest.mark.parametrize("by_graph", [False, True])
def test_penalised_rows_choose_as_in_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_graph: bool) -> None:
    """Prompt in two chunks, then decodes, beside a row without penalties; the plain runner does the same."""
    save_tiny_model(tmp_path, "qwen3", num_hidden_layers=2)
    settings = make_settings(tmp_path, device="cpu", enforce_eager=True, page_size=16, kv_cache_memory=1 << 23)
    plain = make_runner(msgspec.structs.replace(settings, attention_backend="torch"))
    for module in (linear, decoder):
        monkeypatch.setattr(module, "blocked_weight", lambda weight: None)
    monkeypatch.setattr(GraphRunner, "_handle", lambda self, rows: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    runner = make_runner(msgspec.structs.replace(settings, attention_backend="triton"))
    if by_graph:
        runner.graph_memory, runner._buckets, runner._loaded_slots = None, [2], (0, [])
        runner.decode_slots = torch.full((2,), runner.table.padding_slot, dtype=torch.int32)
        prefill, decode = graphs.PrefillGraph(runner, 32, 0), graphs.DecodeGraph(runner, 2)
        prefill.graph.replay, decode.forward.replay = prefill._run, decode._run_forward
        runner.prefill_graphs, runner.decode_graphs = {32: prefill}, {2: decode}
    asks = SamplingParams(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.5)

    def made_by(one: TorchRunner) -> list[list[int]]:
        """Of both slots, pass by pass."""
        dealer, made = PageDealer(one), []
        mine, other, third = (dealer.table(48) for _ in range(3))
        first = Row(0, 0, 16, TOKENS[:16], mine, None)
        last = Row(0, 16, 8, TOKENS[16:24], mine, asks, known_token_ids=TOKENS[:24])
        passes = [Batch([first], 0), Batch([prompt(1, 0, 9, other), last], 0)]
        for index in range(12):
            rows = [Row(0, 24 + index, 1, None, mine, asks, output_index=index + 1)]
            rows.append(Row(1, 9 + index, 1, None, other, GREEDY, output_index=index + 1))
            if index == 5:
                rows.append(prompt(2, 0, 7, third))
            passes.append(Batch(rows, 2))
        for batch in passes:
            handle = one.launch(batch)
            state = one.last_tokens if handle is not None else one.table.state.last_tokens
            made.append(state[: 3 if len(made) > 6 else 2].tolist())
        return made[1:]

    assert made_by(runner) == made_by(plain)
