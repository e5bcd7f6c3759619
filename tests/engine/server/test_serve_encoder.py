"""A server whose model is an encoder: embeddings and scores over HTTP, and a clear error for texts."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.engine.server.dry_server import EngineServer
from tests.support.pooling_models import save_encoder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    folder = tmp_path_factory.mktemp("encoder")
    save_encoder(folder, "bert")
    with EngineServer("--model", str(folder), "--served-model-name", "bert", "--device", "cpu") as server:
        yield server


def answer(server: EngineServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"model": "bert"} | body, timeout=60)


def test_openais_client_gets_embeddings(server: EngineServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    made = client.embeddings.create(model="bert", input=["ab", "sorted names"], dimensions=8)
    assert [len(one.embedding) for one in made.data] == [8, 8]
    assert made.usage.prompt_tokens == len("ab") + len("sortednames") + 4


def test_documents_are_ranked_by_their_likeness(server: EngineServer) -> None:
    made = answer(server, "/v1/rerank", {"query": "ab", "documents": ["xyz", "ab", "abc"], "top_n": 2}).json()
    assert made["results"][0]["index"] == 1
    assert made["results"][0]["relevance_score"] == pytest.approx(1, abs=1e-5)
    assert len(made["results"]) == 2
    scores = answer(server, "/score", {"text_1": "ab", "text_2": ["xyz", "ab"]}).json()["data"]
    assert scores[1]["score"] > scores[0]["score"]


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}]}, "unsupported_task"),
        ("/v1/completions", {"prompt": "ab"}, "unsupported_task"),
        ("/v1/classify", {"input": "ab"}, "unsupported_task"),
        ("/v1/embeddings", {"input": ["ab", "a " * 127]}, "context_length_exceeded"),
        ("/v1/embeddings", {"input": [[1] * 129]}, "context_length_exceeded"),
        ("/v1/embeddings", {"input": "ab", "truncate_prompt_tokens": 129}, None),
    ],
)
def test_a_request_is_refused_by_name_when_an_encoder_cannot_answer(
    server: EngineServer, path: str, body: dict[str, Any], code: str | None
) -> None:
    response = answer(server, path, body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == code
    assert "also hold the output" not in response.text


def test_the_whole_context_is_read_when_nothing_is_generated(server: EngineServer) -> None:
    made = answer(server, "/v1/embeddings", {"input": [[1] * 128, "a " * 126]}).json()
    assert made["usage"]["prompt_tokens"] == 256


def test_what_gateways_and_monitors_read_is_there_when_the_engine_has_no_pages(server: EngineServer) -> None:
    [model] = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    assert (model["max_model_len"], model["model_impl"]) == (128, "transformers")
    answer(server, "/v1/embeddings", {"input": "ab"})
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert "vllm:prompt_tokens_total{" in metrics
    assert httpx.get(f"{server.url}/prompt_assets", timeout=60).status_code == 200
    assert httpx.get(f"{server.url}/readyz", timeout=60).status_code == 200
