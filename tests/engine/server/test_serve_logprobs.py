"""Log probabilities over HTTP in OpenAI's two shapes and in vLLM's, on the demo model: transformers' log-softmax."""

from typing import Any

import openai
import pytest

from tests.engine.server.dry_server import EngineServer
from tests.support.demo_reference import log_softmax, reference_model

PROMPT = "The list is sorted, and then its names are"
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def client(demo: EngineServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none")


@pytest.fixture(scope="module")
def reference() -> Any:
    return reference_model()


def ids_of(demo: EngineServer, text: str) -> list[int]:
    found: list[int] = demo.client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return found


def test_echo_returns_the_logprobs_of_a_text(demo: EngineServer, client: openai.OpenAI, reference: Any) -> None:
    ids = ids_of(demo, PROMPT)
    exact = log_softmax(reference, ids)
    for max_tokens in (0, 3):
        answer = client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=max_tokens, temperature=0, echo=True, logprobs=2
        )
        choice, usage = answer.choices[0], answer.usage
        assert usage is not None
        assert usage.completion_tokens == max_tokens
        reported = choice.logprobs
        assert reported is not None
        assert reported.tokens is not None
        assert reported.token_logprobs is not None
        assert reported.text_offset is not None
        assert reported.top_logprobs is not None
        assert len(reported.tokens) == len(ids) + max_tokens
        assert choice.text.startswith(PROMPT)
        assert "".join(reported.tokens) == choice.text
        assert (reported.token_logprobs[0], reported.top_logprobs[0]) == (None, None)
        expected = [float(exact[index, token]) for index, token in enumerate(ids[1:])]
        assert reported.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=TOLERANCE)
        assert all(2 <= len(top) <= 3 for top in reported.top_logprobs[1:])
        assert [
            choice.text[offset:].startswith(token)
            for offset, token in zip(reported.text_offset, reported.tokens, strict=True)
        ]


@pytest.mark.parametrize("streams", [False, True])
def test_a_chat_returns_logprobs_and_top_logprobs(
    demo: EngineServer, client: openai.OpenAI, reference: Any, streams: bool
) -> None:
    requested: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What does a list hold?"}],
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
        "extra_body": {"return_token_ids": True},
    }
    if streams:
        chunks = list(client.chat.completions.create(stream=True, **requested))
        choices = [choice for chunk in chunks for choice in chunk.choices]
        reported = [position for choice in choices if choice.logprobs for position in choice.logprobs.content or []]
        made = [token for choice in choices for token in (choice.model_extra or {}).get("token_ids") or []]
        whole = client.chat.completions.create(**requested)
        prompt = (whole.model_extra or {})["prompt_token_ids"]
    else:
        answer = client.chat.completions.create(**requested)
        choice = answer.choices[0]
        assert choice.logprobs is not None
        reported = choice.logprobs.content or []
        made, prompt = (choice.model_extra or {})["token_ids"], (answer.model_extra or {})["prompt_token_ids"]
    exact = log_softmax(reference, prompt + made)[len(prompt) - 1 : -1]
    assert len(reported) == len(made)
    for row, token, position in zip(exact, made, reported, strict=True):
        assert position.logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
        assert bytes(position.bytes or []).decode(errors="replace") == position.token
        best = row.topk(3).values.tolist()
        assert [rival.logprob for rival in position.top_logprobs] == pytest.approx(best, abs=TOLERANCE)


def test_a_streamed_completion_has_the_logprobs_of_the_whole_answer(client: openai.OpenAI) -> None:
    requested: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 9, "temperature": 0, "logprobs": 1}
    whole = client.completions.create(**requested).choices[0].logprobs
    pieces = [c.choices[0].logprobs for c in client.completions.create(stream=True, **requested) if c.choices]
    assert whole is not None
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [one for piece in pieces if piece for one in getattr(piece, field)]
        assert streamed == getattr(whole, field)


def test_prompt_logprobs_logit_bias_and_bad_words_work_together(demo: EngineServer, reference: Any) -> None:
    ids = ids_of(demo, PROMPT)
    requested = {"model": "demo", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}

    def post(**fields: Any) -> dict[str, Any]:
        response = demo.client.post("/v1/completions", json=requested | fields)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()["choices"][0]
        return found

    reported = post(prompt_logprobs=1)["prompt_logprobs"]
    exact = log_softmax(reference, ids)
    assert reported[0] is None
    for index, token in enumerate(ids[1:]):
        assert reported[index + 1][str(token)]["logprob"] == pytest.approx(float(exact[index, token]), abs=TOLERANCE)
    plain = post(return_token_ids=True)
    forced = post(logit_bias={"300": 100}, return_token_ids=True, ignore_eos=True)["token_ids"]
    assert forced == [300] * 4
    first = plain["token_ids"][0]
    assert first not in post(logit_bias={str(first): -100}, return_token_ids=True)["token_ids"]
    only = post(allowed_token_ids=[300, 301], return_token_ids=True, ignore_eos=True)["token_ids"]
    assert set(only) <= {300, 301}
    streamed = demo.client.post("/v1/completions", json=requested | {"prompt_logprobs": 1, "stream": True})
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "prompt_logprobs")
