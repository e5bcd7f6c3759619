from contextlib import ExitStack
from typing import Any, cast

import httpx
import pytest

from mini_infer_engine.api.admission import Admission
from mini_infer_engine.api.app import make_app
from mini_infer_engine.api.metrics import ServerMetrics
from mini_infer_engine.api.state import ApiServerState, Core
from mini_infer_engine.config.model.generation_defaults import GenerationDefaults
from mini_infer_engine.config.options.server_options import ServerOptions
from mini_infer_engine.text.text_model import TextModel
from mini_infer_web.api_errors import ApiError


def test_admission_limits_choices_and_releases_them() -> None:
    admission = Admission(max_choices=3, max_body_bytes=100)
    with admission.choices(2):
        with pytest.raises(ApiError) as caught, admission.choices(2):
            pass
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        assert int(caught.value.headers["retry-after"]) >= 1
        assert caught.value.body()["error"]["type"] == "rate_limit_error"
        with admission.choices(1):
            assert admission.num_choices == 3
    assert admission.num_choices == 0
    with pytest.raises(ValueError, match="x"), admission.choices(1):
        raise ValueError("x")
    assert admission.num_choices == 0


def test_admission_accepts_a_lone_large_body_and_refuses_others_meanwhile() -> None:
    admission = Admission(max_choices=3, max_body_bytes=100)
    with admission.body(1000):
        with pytest.raises(ApiError, match=r"1000 bytes.*--max-tokenizing-size") as caught, admission.body(1):
            pass
        assert caught.value.status == 429
    with admission.body(60), admission.body(40):
        assert admission.num_body_bytes == 100
    assert admission.num_body_bytes == 0


def test_a_client_leaves_room_when_it_has_begun_bodies_without_end() -> None:
    admission = Admission(max_choices=3, max_body_bytes=1000)
    with ExitStack() as bodies:
        for _ in range(8):
            grow = bodies.enter_context(admission.read("greedy"))
            grow(10)
            grow(100)
            grow(100)
        with pytest.raises(ApiError) as caught, admission.read("greedy") as grow:
            grow(100)
        assert (caught.value.status, caught.value.code, caught.value.headers["retry-after"]) == (429, "queue_full", "1")
        with admission.read("other") as grow:
            grow(100)
        assert admission.reading.used <= 800
    assert admission.reading.used == 0


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/embeddings",
        "/v1/score",
        "/rerank",
        "/classify",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/completions/render",
        "/v1/chat/completions/render",
        "/tokenize",
        "/detokenize",
        "/invocations",
    ],
)
async def test_a_request_gets_429_when_bodies_being_tokenised_exceed_their_limit(path: str) -> None:
    text = TextModel(("dry",), None, GenerationDefaults())
    core = cast("Core", object())  # nobody gets so far
    state = ApiServerState(text, core, ServerMetrics("dry"), ServerOptions(max_tokenizing_bytes=1000), max_running=1)
    app: Any = make_app(state)
    body = {"model": "dry", "prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}]}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as http:
        with state.admission.body(1000):
            answer = await http.post(path, json=body)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert "--max-tokenizing-size" in answer.text
    assert state.admission.num_body_bytes == 0
