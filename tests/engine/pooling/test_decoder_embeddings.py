"""Embeddings of decoders equal those of transformers, pooled as sentence-transformers pools them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

from mini_infer_engine import LLM, PoolingParams
from tests.support.pooling_models import TEXTS, pooling_llm, save_dense, save_embedding_model, write_json

PROMPTS = {"query": "Instruct: find it\nQuery:", "document": ""}


def last_states(model: Any, llm: LLM, texts: list[str]) -> torch.Tensor:
    """The last token's state of each text, as transformers computes it."""
    with torch.inference_mode():
        states = [
            model(torch.tensor([one.prompt_token_ids])).last_hidden_state[0, -1]
            for one in llm.embed(texts, use_tqdm=False)
        ]
    return torch.stack(states)


def embedded(llm: LLM, texts: Any, **options: Any) -> torch.Tensor:
    return torch.tensor([one.outputs.embedding for one in llm.embed(texts, use_tqdm=False, **options)])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LLM]:
    """A folder as Qwen3-Embedding's: names without "model.", Pooling, Normalize and prompts."""
    folder = tmp_path_factory.mktemp("plain")
    model = save_embedding_model(folder, "Pooling", "Normalize")
    write_json(folder / "config_sentence_transformers.json", prompts=PROMPTS, default_prompt_name=None)
    return model, pooling_llm(folder)


def test_embeddings_equal_transformers_when_the_checkpoint_is_a_bare_decoder(plain: tuple[Any, LLM]) -> None:
    model, llm = plain
    assert torch.allclose(embedded(llm, TEXTS), normalize(last_states(model, llm, TEXTS), dim=-1), atol=1e-5)
    raw = embedded(llm, TEXTS, pooling_params=PoolingParams(use_activation=False))
    assert torch.allclose(raw, last_states(model, llm, TEXTS), atol=1e-4)


def test_embeddings_are_cut_and_normalised_again_when_dimensions_are_requested(plain: tuple[Any, LLM]) -> None:
    _, llm = plain
    whole, cut = embedded(llm, TEXTS), embedded(llm, TEXTS, pooling_params=PoolingParams(dimensions=16))
    assert torch.allclose(cut, normalize(whole[:, :16], dim=-1), atol=1e-6)
    with pytest.raises(ValueError, match="dimensions"):
        llm.embed("x", use_tqdm=False, pooling_params=PoolingParams(dimensions=65))


def test_a_prompt_goes_before_the_text_when_it_is_named(plain: tuple[Any, LLM]) -> None:
    _, llm = plain
    expected = embedded(llm, [PROMPTS["query"] + text for text in TEXTS])
    assert torch.equal(embedded(llm, TEXTS, prompt_name="query"), expected)
    with pytest.raises(ValueError, match="prompt_name"):
        llm.embed("x", use_tqdm=False, prompt_name="other")


def test_texts_are_cut_on_the_left_when_truncation_is_requested(plain: tuple[Any, LLM]) -> None:
    _, llm = plain
    (whole,) = llm.embed(TEXTS[1], use_tqdm=False)
    (cut,) = llm.embed(TEXTS[1], use_tqdm=False, truncate_prompt_tokens=3)
    assert cut.prompt_token_ids == whole.prompt_token_ids[-3:]
    with pytest.raises(ValueError, match="truncate_prompt_tokens"):
        llm.embed("x", use_tqdm=False, truncate_prompt_tokens=128)
    with pytest.raises(ValueError, match="prompt 1"):
        llm.embed(["x", [1] * 128], use_tqdm=False)


def test_dense_layers_are_applied_and_nothing_is_normalised_when_the_folder_says_so(tmp_path: Path) -> None:
    model = save_embedding_model(tmp_path, "Pooling", "Dense")
    dense = save_dense(tmp_path / "2_Dense", 64, 24)
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", **config, matryoshka_dimensions=[8, 16])
    llm = pooling_llm(tmp_path)
    assert torch.allclose(embedded(llm, TEXTS), dense(last_states(model, llm, TEXTS)), atol=1e-5)
    assert embedded(llm, TEXTS, pooling_params=PoolingParams(dimensions=8)).shape == (3, 8)
    with pytest.raises(ValueError, match="dimensions"):
        llm.embed("x", use_tqdm=False, pooling_params=PoolingParams(dimensions=12))
    with pytest.raises(ValueError, match="ForSequenceClassification"):
        llm.classify("x", use_tqdm=False)
