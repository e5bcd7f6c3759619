"""Encoders in the pooling engine: embeddings, classes and scores equal those of transformers on random tiny models."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import normalize

from mini_infer_engine import LLM, PoolingParams, SamplingParams
from mini_infer_engine.config.pooling.read_pooler import ENCODER_TYPES
from tests.support.pooling_models import ENCODERS, TEXTS, pooling_llm, save_encoder, write_modules

LONG = ["ab", "the names are sorted, which of them are the first?", "a", "join(left, right)"]


def states(model: Any, inputs: Any) -> torch.Tensor:
    """The states of one text's tokens [tokens, hidden], as transformers computes them."""
    with torch.inference_mode():
        found: torch.Tensor = model(**inputs).last_hidden_state[0]
    return found


def embedded(llm: LLM, texts: list[str], **options: Any) -> torch.Tensor:
    return torch.tensor([one.outputs.embedding for one in llm.embed(texts, use_tqdm=False, **options)])


def tokenized(folder: Path, *texts: str) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer(*texts, return_tensors="pt")


def test_each_encoder_that_is_listed_has_a_tiny_model() -> None:
    assert ENCODERS.keys() == ENCODER_TYPES


@pytest.mark.parametrize("model_type", ENCODERS)
def test_embeddings_equal_transformers_when_an_encoder_pools_its_first_token(tmp_path: Path, model_type: str) -> None:
    model = save_encoder(tmp_path, model_type)
    llm = pooling_llm(tmp_path)
    assert llm.model_info.pooler.pooling_type == "cls"
    for text, vector in zip(LONG, embedded(llm, LONG), strict=True):
        inputs = {"input_ids": tokenized(tmp_path, text)["input_ids"]}
        assert torch.allclose(vector, normalize(states(model, inputs)[0], dim=-1), atol=1e-5)


@pytest.mark.parametrize(("pooling", "normalizes"), [("mean_tokens", True), ("cls_token", False), ("lasttoken", True)])
def test_pooling_is_that_of_the_folder_when_it_is_sentence_transformers(
    tmp_path: Path, pooling: str, normalizes: bool
) -> None:
    model = save_encoder(tmp_path, "bert")
    write_modules(tmp_path, "Pooling", *(["Normalize"] if normalizes else []), pooling=pooling)
    llm = pooling_llm(tmp_path)
    for text, vector in zip(LONG, embedded(llm, LONG), strict=True):
        tokens = states(model, tokenized(tmp_path, text))
        pooled = {"mean_tokens": tokens.mean(0), "cls_token": tokens[0], "lasttoken": tokens[-1]}[pooling]
        assert torch.allclose(vector, normalize(pooled, dim=-1) if normalizes else pooled, atol=1e-5)


def test_a_decoder_pools_the_mean_when_its_folder_says_so(tmp_path: Path) -> None:
    from tests.support.pooling_models import save_embedding_model

    model = save_embedding_model(tmp_path)
    write_modules(tmp_path, "Pooling", "Normalize", pooling="mean_tokens")
    llm = pooling_llm(tmp_path)
    assert not llm.model_info.pooler.generates
    for text, vector in zip(TEXTS, embedded(llm, TEXTS), strict=True):
        mean = states(model, {"input_ids": tokenized(tmp_path, text)["input_ids"]}).mean(0)
        assert torch.allclose(vector, normalize(mean, dim=-1), atol=1e-5)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LLM, Path]:
    folder = tmp_path_factory.mktemp("bert")
    model = save_encoder(folder, "bert")
    return model, pooling_llm(folder, max_num_seqs=2, max_num_batched_tokens=128), folder


def test_results_do_not_depend_on_batches_when_inputs_are_many(bert: tuple[Any, LLM, Path]) -> None:
    _, llm, _ = bert
    texts = [letter * length for letter in "ab" for length in (1, 40, 3, 17, 60, 2)]
    alone = torch.cat([embedded(llm, [text]) for text in texts])
    assert torch.allclose(embedded(llm, texts), alone, atol=1e-5)


def test_the_whole_context_is_read_when_nothing_is_generated(bert: tuple[Any, LLM, Path]) -> None:
    _, llm, folder = bert
    (longest,) = llm.embed("a " * 126, use_tqdm=False)
    assert len(longest.prompt_token_ids) == llm.model_info.max_model_len == 128
    with pytest.raises(ValueError, match="prompt 1"):
        llm.embed(["a", "a " * 127], use_tqdm=False)
    (cut,) = llm.embed("a " * 300, use_tqdm=False, truncate_prompt_tokens=-1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert cut.prompt_token_ids == tokenizer("a " * 300, truncation=True, max_length=128)["input_ids"]


def test_a_text_is_refused_by_name_when_the_model_is_an_encoder(bert: tuple[Any, LLM, Path]) -> None:
    _, llm, _ = bert
    with pytest.raises(ValueError, match="ForCausalLM"):
        llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)
    with pytest.raises(ValueError, match="ForSequenceClassification"):
        llm.classify("a", use_tqdm=False)


def test_metrics_are_read_when_the_engine_has_no_pages(bert: tuple[Any, LLM, Path]) -> None:
    _, llm, _ = bert
    llm.embed("a", use_tqdm=False)
    assert llm.reset_prefix_cache() is True
    values = {metric.name: metric.value for metric in llm.get_metrics()}
    assert values["vllm:prompt_tokens"] >= 3


@pytest.mark.parametrize("model_type", ["bert", "roberta", "deberta-v2", "modernbert", "distilbert"])
def test_scores_equal_transformers_when_the_model_is_a_cross_encoder(tmp_path: Path, model_type: str) -> None:
    model = save_encoder(tmp_path, model_type, num_labels=1)
    llm = pooling_llm(tmp_path)
    assert llm.model_info.pooler.uses_token_types == (model_type == "bert")
    query, documents = LONG[0], LONG[1:]
    for document, one in zip(documents, llm.score(query, documents, use_tqdm=False), strict=True):
        inputs = tokenized(tmp_path, query, document)
        assert one.prompt_token_ids == inputs["input_ids"][0].tolist()
        if model_type != "bert":
            inputs = {"input_ids": inputs["input_ids"]}
        with torch.inference_mode():
            expected = model(**inputs).logits[0].sigmoid()
        assert one.outputs.score == pytest.approx(float(expected), abs=1e-5)


def test_classes_equal_transformers_when_an_encoder_has_several_labels(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "bert", num_labels=3)
    llm = pooling_llm(tmp_path)
    raw = PoolingParams(use_activation=False)
    for text, one in zip(LONG, llm.classify(LONG, use_tqdm=False, pooling_params=raw), strict=True):
        with torch.inference_mode():
            expected = model(**tokenized(tmp_path, text)).logits[0]
        assert one.outputs.probs == pytest.approx(expected.tolist(), abs=1e-5)
    with pytest.raises(ValueError, match="one label"):
        llm.score("a", "b", use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"quantization": "int8"}, "quantization"),
        ({"model_impl": "native"}, "model_impl"),
        ({"max_model_len": 129}, "max_model_len"),
        ({"speculative_method": "ngram"}, "speculative_method"),
    ],
)
def test_an_option_is_refused_by_name_when_an_encoder_does_not_have_it(
    bert: tuple[Any, LLM, Path], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        pooling_llm(bert[2], **options)
