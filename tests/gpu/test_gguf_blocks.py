"""GGUF files whose blocks stay packed, on a GPU: models against the weights that the files stand for."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton, and an NVIDIA GPU")
pytest.importorskip("gguf", reason="needs the package gguf, by which files are written")

from gguf import GGMLQuantizationType as Encoding

from mini_infer_engine.gguf.folder import model_folder
from tests.gpu.device import GPU_ONLY
from tests.gpu.runs import make_engine, make_runner, make_settings, mixed_requests, texts
from tests.support.gguf_files import write_gguf
from tests.support.tiny_models import PageDealer, reference_logits, run_chunks

pytestmark = GPU_ONLY
TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(90)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("encoding", [Encoding.Q4_0, Encoding.Q4_1, Encoding.Q8_0, Encoding.Q4_K])
def test_logits_equal_those_of_expanded_weights_when_gguf_blocks_stay_packed(
    encoding: Encoding, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shape = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "tie_word_embeddings": tied}
    mixed = {"blk.0.attn_v.weight": Encoding.Q6_K, "blk.0.ffn_down.weight": Encoding.Q6_K}
    model = write_gguf(tmp_path / "m.gguf", "llama", encoding=encoding, encodings=mixed, **shape)
    expected = reference_logits(model, TOKENS)
    runner = make_runner(make_settings(model_folder(tmp_path / "m.gguf"), enforce_eager=True, page_size=16))
    assert type(runner.worker.model.layers[0].self_attn.qkv_proj.method).__name__ == "GroupedMethod"
    assert runner.worker.model.embeddings.has_groups
    dealer = PageDealer(runner)
    for sizes in ([90], [33, 1, 56], [80] + [1] * 10):
        actual = run_chunks(runner, TOKENS, dealer.table(90), sizes).cpu()
        assert (actual - expected).abs().max() <= 2e-3 * expected.abs().max(), sizes


@pytest.mark.parametrize("tied", [False, True])
def test_graphs_and_single_passes_make_the_same_text_when_gguf_blocks_stay_packed(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shape = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "tie_word_embeddings": tied}
    write_gguf(tmp_path / "m.gguf", "qwen3", encoding=Encoding.Q4_K, **shape)
    made = []
    for eager in (False, True):
        settings = make_settings(model_folder(tmp_path / "m.gguf"), dtype="bfloat16", enforce_eager=eager)
        made.append(texts(make_engine(settings, make_runner(settings)), mixed_requests(12, 199, 100)))
    same = sum(first == second for first, second in zip(*made, strict=True))
    assert same >= len(made[0]) * 3 // 4, "rows of other passes round differently, most texts are the same"


def test_experts_are_right_when_gguf_blocks_stay_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shape = {"hidden_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    shape |= {"head_dim": 32, "norm_topk_prob": True, "decoder_sparse_step": 1}
    encodings = {"blk.0.ffn_down_exps.weight": Encoding.Q8_0, "blk.1.ffn_gate_exps.weight": Encoding.Q4_1}
    model = write_gguf(
        tmp_path / "m.gguf", "qwen3moe", encoding=Encoding.Q4_0, encodings=encodings, packs_experts=True, **shape
    )
    expected = reference_logits(model, TOKENS)
    runner = make_runner(make_settings(model_folder(tmp_path / "m.gguf"), enforce_eager=True, page_size=16))
    assert runner.worker.model.layers[0].mlp.stored is not None
    for sizes in ([90], [33, 1, 1, 55]):
        actual = run_chunks(runner, TOKENS, PageDealer(runner).table(90), sizes).cpu()
        assert (actual - expected).abs().max() <= 1e-3 * expected.abs().max(), sizes
