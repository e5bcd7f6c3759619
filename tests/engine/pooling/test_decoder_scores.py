"""Scores of decoders with a classification head, and of causal models whose tokens are the labels."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer_engine import LLM, PoolingParams, SamplingParams
from mini_infer_prompts.prompt import PromptAssets, PromptEncoder
from tests.support.pooling_models import TEXTS, pooling_llm, save_classifier
from tests.support.tiny_models import save_tiny_model_with_text

RERANKER = {"architectures": ["Qwen3ForSequenceClassification"], "method": "from_2_way_softmax"}
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'query' %}<Query>: {{ message.content }}{% endif %}"
    '{% if message.role == "document" %}, <Document>: {{ message.content }}{% endif %}{% endfor %}, answer:'
)

QWEN3 = (
    "Judge the Document.<Instruct>: {{ instruction | default(messages | selectattr('role', 'eq', 'system') | "
    "map(attribute='content') | first | default('retrieve passages', true), true) }}<Query>: {{ messages | "
    'selectattr("role", "eq", "query") | map(attribute="content") | first }}<Document>: {{ messages | '
    'selectattr("role", "eq", "document") | map(attribute="content") | first }}'
)
"""A score template that selects messages by their roles, as that of Qwen3-Reranker in vLLM's examples does."""


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return found


@pytest.mark.parametrize(
    ("architecture", "num_labels"), [("qwen3", 3), ("qwen2", 2), ("llama", 1), ("mistral", 4), ("gemma2", 3)]
)
def test_classes_equal_transformers_when_a_decoder_has_a_classification_head(
    tmp_path: Path, architecture: str, num_labels: int
) -> None:
    model = save_classifier(tmp_path, architecture, num_labels)
    llm = pooling_llm(tmp_path)
    for one in llm.classify(TEXTS, use_tqdm=False):
        expected = logits(model, one.prompt_token_ids)
        expected = expected.sigmoid() if num_labels == 1 else expected.softmax(-1)
        assert one.outputs.probs == pytest.approx(expected.tolist(), abs=1e-5)
        assert one.outputs.num_classes == num_labels
    (raw,) = llm.classify(TEXTS[0], use_tqdm=False, pooling_params=PoolingParams(use_activation=False))
    assert raw.outputs.probs == pytest.approx(logits(model, raw.prompt_token_ids).tolist(), abs=1e-4)
    for call in (llm.embed, llm.generate):
        with pytest.raises(ValueError, match="/v1/classify"):
            call("x", use_tqdm=False)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("reranker")
    save_tiny_model_with_text(folder, "qwen3")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), folder


def reranking(folder: Path, **options: Any) -> tuple[LLM, list[int]]:
    encoder = PromptEncoder(PromptAssets.from_directory(folder))
    tokens = [next(token for token in encoder.tokenizer.get_vocab() if token == word) for word in ("no", "es")]
    ids = [encoder.tokenizer.token_to_id(token) for token in tokens]
    return pooling_llm(folder, hf_overrides=RERANKER | {"classifier_from_token": tokens}, **options), ids


def test_scores_are_the_two_way_softmax_when_tokens_are_the_labels(reranker: tuple[Any, Path]) -> None:
    model, folder = reranker
    llm, ids = reranking(folder)
    for one in llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False):
        expected = logits(model, one.prompt_token_ids)[-1][ids].softmax(-1)[1]
        assert one.outputs.score == pytest.approx(float(expected), abs=1e-5)
    with pytest.raises(ValueError, match="ForCausalLM"):
        llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)


def test_pairs_are_rendered_when_the_chat_template_has_query_and_document(reranker: tuple[Any, Path]) -> None:
    _, folder = reranker
    llm, _ = reranking(folder, chat_template=TEMPLATE)
    (one,) = llm.score("q", "d", use_tqdm=False)
    assert llm.get_tokenizer().decode(one.prompt_token_ids) == "<Query>: q, <Document>: d, answer:"


def test_qwen3_reranker_is_read_when_vllms_overrides_name_it(reranker: tuple[Any, Path]) -> None:
    model, folder = reranker
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "is_original_qwen3_reranker": True}
    llm, ids = reranking(folder)
    no, yes = llm.get_tokenizer().convert_ids_to_tokens(ids)
    named = pooling_llm(folder, hf_overrides=overrides | {"classifier_from_token": [no, yes]}, chat_template=QWEN3)
    assert named.model_info.pooler.from_tokens == llm.model_info.pooler.from_tokens
    (one,) = named.score("which?", "that one", use_tqdm=False)
    text = named.get_tokenizer().decode(one.prompt_token_ids)
    assert text == "Judge the Document.<Instruct>: retrieve passages<Query>: which?<Document>: that one"
    expected = logits(model, one.prompt_token_ids)[-1][ids].softmax(-1)[1]
    assert one.outputs.score == pytest.approx(float(expected), abs=1e-5)


def test_logits_of_one_token_are_the_score_when_nothing_is_processed(reranker: tuple[Any, Path]) -> None:
    model, folder = reranker
    (token,) = reranking(folder)[0].get_tokenizer().convert_ids_to_tokens([70])
    llm = pooling_llm(
        folder, hf_overrides={"architectures": RERANKER["architectures"], "classifier_from_token": [token]}
    )
    for one in llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False):
        expected = logits(model, one.prompt_token_ids)[-1][70].sigmoid()
        assert one.outputs.score == pytest.approx(float(expected), abs=1e-5)


def test_tokens_are_the_labels_when_the_model_runs_through_transformers(tmp_path: Path) -> None:
    save_tiny_model_with_text(tmp_path, "gemma", head_dim=16)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    encoder = PromptEncoder(PromptAssets.from_directory(tmp_path))
    overrides = {
        "architectures": ["GemmaForSequenceClassification"],
        "classifier_from_token": [encoder.tokenizer.id_to_token(70)],
        "method": "no_post_processing",
    }
    llm = pooling_llm(tmp_path, hf_overrides=overrides)
    assert llm.model_info.model_impl == "transformers"
    (one,) = llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)
    expected = logits(model, one.prompt_token_ids)[-1][70].sigmoid()
    assert one.outputs.score == pytest.approx(float(expected), abs=1e-5)


def test_classes_equal_transformers_when_no_file_of_ours_runs_the_decoder(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, "starcoder2", 3)
    llm = pooling_llm(tmp_path)
    for one in llm.classify(TEXTS, use_tqdm=False):
        assert one.outputs.probs == pytest.approx(logits(model, one.prompt_token_ids).softmax(-1).tolist(), abs=1e-5)


def test_scores_are_cosines_when_the_model_makes_embeddings(reranker: tuple[Any, Path]) -> None:
    llm = pooling_llm(reranker[1])
    vectors = torch.tensor([one.outputs.embedding for one in llm.embed(TEXTS, use_tqdm=False)])
    scores = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
    assert scores == pytest.approx((vectors @ vectors[0]).tolist(), abs=1e-5)
    with pytest.raises(ValueError, match="data_1"):
        llm.score(TEXTS[:2], TEXTS, use_tqdm=False)
