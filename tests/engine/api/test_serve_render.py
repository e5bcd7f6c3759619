"""What a request becomes, told without generating."""

from typing import Any

import httpx

from tests.engine.server.dry_server import DryServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Zoë says hi"}]


def rendered(server: DryServer, body: dict[str, Any], path: str = CHAT) -> Any:
    response = server.client.post(path + "/render", json={"model": "dry"} | body)
    assert response.status_code == 200, response.text
    return response.json()


def test_render_returns_the_prompt_of_a_chat(server: DryServer) -> None:
    answer = rendered(server, {"messages": MESSAGES, "temperature": 0.25, "stop": "END", "max_tokens": 7})
    assert answer["prompt"] == "<|im_start|>user\nZoë says hi<|im_end|>\n<|im_start|>assistant\n"
    assert answer["request_id"].startswith("chatcmpl-")
    body = {"model": "dry", "messages": MESSAGES, "return_token_ids": True, "max_tokens": 7}
    generated = server.client.post(CHAT, json=body).json()
    assert answer["token_ids"] == generated["prompt_token_ids"]
    requested = answer["sampling_params"]
    assert (requested["temperature"], requested["stop"], requested["max_tokens"], requested["n"]) == (
        0.25,
        ["END"],
        7,
        1,
    )
    assert (answer["stream"], answer["stream_options"]) == (False, None)


def test_render_returns_each_prompt_of_a_completion(server: DryServer) -> None:
    first, second = rendered(server, {"prompt": ["ab", "c"], "n": 2, "stream": True}, COMPLETIONS)
    assert (first["prompt"], second["prompt"]) == ("ab", "c")
    assert first["token_ids"] == [*b"ab"]
    assert first["sampling_params"]["n"] == 2
    assert first["stream_options"] == {"include_usage": False, "continuous_usage_stats": False}


def test_rendered_max_tokens_is_the_rest_of_the_context_when_none_is_given(server: DryServer) -> None:
    answer = rendered(server, {"messages": MESSAGES})
    assert answer["sampling_params"]["max_tokens"] == 4096 - len(answer["token_ids"])


def test_render_refuses_what_generation_refuses(server: DryServer) -> None:
    def status(body: dict[str, Any]) -> httpx.Response:
        return server.client.post(CHAT + "/render", json=body)

    assert status({"model": "none", "messages": MESSAGES}).status_code == 404
    assert status({"model": "dry", "messages": MESSAGES, "temperature": 5}).json()["error"]["param"] == "temperature"
    assert status({"model": "dry", "messages": [{"role": "user", "content": "x" * 5000}]}).status_code == 400
