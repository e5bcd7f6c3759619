"""Scores, reranked documents and classes: bodies become prompts, and pooled numbers the answers of vLLM and Cohere."""

import math
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from mini_infer_engine.api import answers
from mini_infer_engine.api.dialects.base import Dialect
from mini_infer_engine.api.dialects.pooling.classify import ClassifyDialect
from mini_infer_engine.api.dialects.pooling.embeddings import EmbeddingDialect
from mini_infer_engine.api.dialects.pooling.rerank import RerankDialect
from mini_infer_engine.api.dialects.pooling.score import ScoreDialect
from mini_infer_engine.config.pooling.pooler_config import PoolerConfig
from mini_infer_engine.core.request import Output, Request, SamplingParams
from mini_infer_engine.core_process.messages import ModelInfo
from mini_infer_engine.dry.vocabulary import dry_assets
from mini_infer_engine.text.output_text import OutputText
from mini_infer_engine.text.pooled_prompts import check_task
from mini_infer_engine.text.tokenizing import whole
from mini_infer_prompts.prompt import PromptEncoder
from mini_infer_web.api_errors import ApiError

CROSS_ENCODER = PoolerConfig(
    task="classify", size=1, activation="sigmoid", labels=["LABEL_0"], generates=False, is_cross_encoder=True
)
CLASSIFIER = PoolerConfig(task="classify", size=3, activation="softmax", labels=["a", "b", "c"], generates=False)
EMBEDDER = PoolerConfig(size=2, prompts={"query": "Q: "}, default_prompt_name="query")


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(dry_assets())


def model(pooler: PoolerConfig) -> ModelInfo:
    return ModelInfo(max_model_len=64, vocab_size=300, page_size=16, num_pages=9, pooler=pooler)


class Asked:
    """A request of a dialect, its prompts, and the answer that is made of numbers for each prompt."""

    def __init__(
        self,
        make: Any,
        pooler: PoolerConfig,
        body: dict[str, Any],
        encoder: PromptEncoder,
        numbers: Sequence[Sequence[float]] = (),
    ) -> None:
        dialect: Dialect = make(lambda: model(pooler))
        spec = dialect.parse(body)
        ids = whole(spec.prompt_ids(encoder, None, None))
        self.texts = [encoder.decode(one) for one in ids]
        self.task = spec.task
        replies = []
        for prompt, one in zip(ids, numbers or [[0.0]] * len(ids), strict=True):
            request = Request(request_id="r", prompt_token_ids=prompt, sampling=SamplingParams(), embeds=True)
            reply = OutputText(request, None)
            reply.push(Output("r", [], finish_reason="stop", embedding=array("f", one).tobytes()))
            replies.append(reply)
        self.num_tokens = sum(map(len, ids))
        self.answer: dict[str, Any] = msgspec.json.decode(dialect.renderer(spec, "x", "m", None).whole(replies))


def test_pairs_are_read_together_when_the_model_is_a_cross_encoder(encoder: PromptEncoder) -> None:
    body = {"text_1": "q", "text_2": ["a", {"text": "b"}]}
    asked = Asked(ScoreDialect, CROSS_ENCODER, body, encoder, [[0.0], [math.log(3)]])
    assert (asked.texts, asked.task) == (["qa", "qb"], "score")
    assert [one["score"] for one in asked.answer["data"]] == pytest.approx([0.5, 0.75])
    assert asked.answer["usage"] == {"prompt_tokens": asked.num_tokens, "total_tokens": asked.num_tokens}
    msgspec.convert(asked.answer, answers.Scores, strict=True)


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"), ("queries", "items")]
)
def test_scores_are_cosines_when_the_model_makes_embeddings(encoder: PromptEncoder, names: tuple[str, str]) -> None:
    body = dict(zip(names, (["p", "q"], ["a", "b"]), strict=True))
    asked = Asked(ScoreDialect, EMBEDDER, body, encoder, [[1, 0], [0, 2], [3, 0], [5, 0]])
    assert asked.texts == ["Q: p", "Q: q", "Q: a", "Q: b"]
    assert [one["score"] for one in asked.answer["data"]] == pytest.approx([1, 0])


def test_documents_are_sorted_and_limited_when_they_are_reranked(encoder: PromptEncoder) -> None:
    body = {"query": "q", "documents": ["a", {"text": "b"}, "c"], "top_n": 2}
    asked = Asked(RerankDialect, CROSS_ENCODER, body, encoder, [[-1], [2], [1]])
    assert asked.texts == ["qa", "qb", "qc"]
    results = asked.answer["results"]
    assert [(one["index"], one["document"]) for one in results] == [(1, {"text": "b"}), (2, {"text": "c"})]
    assert results[0]["relevance_score"] == pytest.approx(1 / (1 + math.exp(-2)))
    msgspec.convert(asked.answer, answers.Reranked, strict=True)
    plain = Asked(RerankDialect, CROSS_ENCODER, body | {"return_documents": False}, encoder, [[-1], [2], [1]])
    assert "document" not in plain.answer["results"][0]


def test_raw_numbers_are_answered_when_activation_is_refused(encoder: PromptEncoder) -> None:
    body = {"text_1": "q", "text_2": "a", "use_activation": False}
    assert Asked(ScoreDialect, CROSS_ENCODER, body, encoder, [[7]]).answer["data"][0]["score"] == 7


def test_classes_have_labels_and_probabilities(encoder: PromptEncoder) -> None:
    asked = Asked(ClassifyDialect, CLASSIFIER, {"input": ["x", [1, 2]]}, encoder, [[0, 0, 1], [9, 0, 0]])
    first, second = asked.answer["data"]
    assert (first["label"], second["label"], first["num_classes"]) == ("c", "a", 3)
    assert math.fsum(first["probs"]) == pytest.approx(1)
    msgspec.convert(asked.answer, answers.Classes, strict=True)


@pytest.mark.parametrize(("name", "text"), [({}, "Q: x"), ({"prompt_name": "query"}, "Q: x")])
def test_the_models_default_prompt_goes_before_a_text(encoder: PromptEncoder, name: dict[str, str], text: str) -> None:
    asked = Asked(EmbeddingDialect, EMBEDDER, {"input": ["x", [88, 89]]} | name, encoder, [[1, 0], [0, 1]])
    assert asked.texts[0] == text
    assert len(asked.texts[1]) == 2  # token ids get no prompt


@pytest.mark.parametrize(
    ("side", "texts"), [({}, ["ghi"]), ({"truncation_side": "right"}, ["abc"]), ({"truncation_side": "left"}, ["ghi"])]
)
def test_a_text_is_cut_when_it_is_longer_than_requested(
    encoder: PromptEncoder, side: dict[str, str], texts: list[str]
) -> None:
    body = {"input": "abcdefghi", "truncate_prompt_tokens": 3} | side
    assert Asked(EmbeddingDialect, PoolerConfig(size=1), body, encoder).texts == texts


@pytest.mark.parametrize(
    ("pooler", "possible"),
    [
        (PoolerConfig(), {"generate", "embed", "score"}),
        (PoolerConfig(generates=False), {"embed", "score"}),
        (CROSS_ENCODER, {"classify", "score"}),
        (CLASSIFIER, {"classify"}),
    ],
)
def test_a_task_is_refused_by_name_when_the_model_cannot_do_it(pooler: PoolerConfig, possible: set[str]) -> None:
    for task in ("generate", "embed", "classify", "score"):
        if task in possible:
            check_task(pooler, task)
        else:
            with pytest.raises(ApiError) as caught:
                check_task(pooler, task)
            assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unsupported_task", "model")
