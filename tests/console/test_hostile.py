"""The console in a real Chromium before fake engines: hostile texts, clumsy users, keys, and engines that die."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from mini_infer_engine.api.openapi.document import document
from mini_infer_gateway.fleet.breaker import FAILURES_TO_OPEN
from mini_infer_web.api_keys import ApiKeys
from tests.support.chromium import Browser
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import RunningGateway, running_gateway

Do = Callable[..., Any]
KEYS = "sk-ops name=ops admin=true\nsk-a name=team-a\nsk-b name=team-b\n"
MARKUP = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
ANSWER = (
    f"{MARKUP}\n\nA text <img src=x onerror='window.hacked = 1'> "
    "![picture](http://127.0.0.1:9/picture.png) [link](javascript:window.hacked=1) "
    "[data](data:text/html,x) **bold** `<b>code</b>`"
)
PATHOLOGICAL = (
    "[" * 20_000,
    "*a " * 10_000,
    "> " * 10_000,
    "`" * 9_999 + " ",
    "- " * 5_000,
    "![" * 9_000,
    "|a" * 9_000,
)
"""Texts for which readers of Markdown take long, or overflow their stacks."""


def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: %s\n\n" % json.dumps({"id": "one", "object": "chat.completion.chunk", "choices": [choice]}).encode()


def stream(*texts: str) -> list[bytes]:
    return [*(chunk({"content": text}) for text in texts), chunk({}, "stop"), b"data: [DONE]\n\n"]


@asynccontextmanager
async def console(
    browser: Browser, storage: dict[str, str] | None = None, model: str = "m", opens: bool = True, **settings: Any
) -> AsyncIterator[tuple[Do, FakeEngine, RunningGateway]]:
    """Yields the browser with the console open, an engine that says what the test wants, and the gateway."""

    async def do(command: str, **given: Any) -> Any:
        return await asyncio.to_thread(browser, command, **given)

    async with FakeEngine("e1", model=model) as engine, running_gateway(engine.endpoint, **settings) as gateway:
        engine.chunks = stream("an ", "answer")
        await gateway.settled()
        await do("open", url=gateway.url, storage=storage or {})
        yield do, engine, gateway
        # The gateway stops, and an open page would find it gone.
        await do("visit", url=f"{gateway.url}/console/icon.svg", waits_for="svg")


async def test_no_script_runs_and_nothing_is_loaded_when_a_model_an_answer_and_a_tool_have_html(
    browser: Browser,
) -> None:
    async with console(browser, model="<b>m</b>") as (do, engine, _):
        call = {"index": 0, "id": MARKUP, "function": {"name": MARKUP, "arguments": MARKUP}}
        engine.chunks = [chunk({"reasoning": MARKUP}), chunk({"content": ANSWER}), chunk({"tool_calls": [call]})]
        engine.chunks += [chunk({}, "tool_calls"), b"data: [DONE]\n\n"]
        await do("ask", text=MARKUP)
        html = await do("html", selector=".message.assistant .markdown")
        assert "<script" not in html
        assert "<img" not in html
        assert "javascript:" not in re.sub(r">[^<]*<", "><", html)
        assert re.findall(r'href="([^"]+)"', html) == ["http://127.0.0.1:9/picture.png"]
        assert "<strong>bold</strong>" in html
        await do("until", selector=".tool-call", matches="Calls <script>")
        await do("fill", label="Result of", text=MARKUP)
        engine.chunks = stream(MARKUP)
        await do("press", name="Answer the call", answers=1)
        for page in ("fleet", "prefixes", "requests"):
            await do("go", page=page)
            await do("until", matches="<b>m</b>" if page != "fleet" else "e1")
        assert await do("count", selector="main img, main script") == 0
        assert await do("problems") == []


async def test_the_page_stays_quick_when_an_answer_is_huge_or_nested_deep(browser: Browser) -> None:
    async with console(browser) as (do, engine, _):
        for text in (*PATHOLOGICAL, "word " * 60_000):
            engine.chunks = stream(text)
            await do("ask", text="go on", limit_ms=30_000)  # 0.3 s where nothing else runs
            await do("press", name="New chat")
        assert await do("problems") == []


async def test_the_rest_is_kept_and_the_chat_goes_on_when_an_engine_dies_in_mid_stream(browser: Browser) -> None:
    async with console(browser) as (do, engine, _):
        engine.chunks, engine.die_after = stream("the first half, ", "the second"), 1
        told = await do("ask", text="something")
        assert "the first half" in told["text"]
        assert "e1" in told["text"], "the error names the engine"
        assert await do("count", selector=".message .error") == 1
        engine.die_after = None
        told = await do("press", name="Regenerate", answers=1)
        assert "the second" in told["text"]
        assert await do("count", selector=".message .error") == 0


async def test_a_part_of_an_answer_is_kept_when_the_page_is_loaded_again_in_mid_stream(browser: Browser) -> None:
    async with console(browser) as (do, engine, _):
        engine.chunks, engine.chunk_delay_s = stream("half an answer", "the rest"), 60.0
        await do("fill", label="Message", text="something")
        await do("press", name="Send")
        await do("until", selector=".message.assistant", matches="half an answer")
        await do("reload")
        await do("until", selector=".message.assistant", matches="half an answer.*ended: interrupted")
        engine.chunk_delay_s = 0.0
        told = await do("ask", text="and then?")
        assert "the rest" in told["text"]
        assert await do("count", selector=".message") == 4


async def test_each_tab_keeps_its_chat_when_two_are_open(browser: Browser) -> None:
    async with console(browser) as (do, _, gateway):
        await do("ask", text="of the first tab")
        await do("another", url=gateway.url)
        await do("press", name="New chat")
        await do("ask", text="of the second tab")
        await do("turn", to=0)
        await do("reload")
        await do("until", selector=".message.user", matches="of the first tab")
        assert await do("count", selector=".message") == 2
        assert await do("problems") == []


@pytest.mark.parametrize(
    "stored",
    [
        "{not JSON",
        "null",
        '{"settings": 7, "columns": []}',
        '{"settings": {"system": 7, "tools": null}, "columns": [{"messages": [null, 7, {"role": "x"}]}]}',
        '{"columns": [{"engine": "gone", "messages": [{"role": "tool", "content": 7, "logprobs": 7, "stats": 7}]}]}',
        '{"columns": [{"messages": [{"role": "assistant", "content": "x", "toolCalls": [null]}]}]}',
    ],
)
async def test_the_page_works_when_what_is_stored_is_broken(browser: Browser, stored: str) -> None:
    async with console(browser, {"mini-infer-playground": stored}) as (do, _, _):
        if "gone" in stored:
            assert await do("value", label="Engine") == "gone"
            await do("choose", label="Engine", value="")
        if "toolCalls" in stored:
            await do("press", name="Forget the chats and begin anew")
        assert "an answer" in (await do("ask", text="something"))["text"]


async def test_a_chat_goes_on_when_the_browsers_storage_is_full(browser: Browser) -> None:
    messages = [
        {"role": "user", "content": "long ago " * 20},
        {"role": "assistant", "content": "yes", "finish": "stop"},
    ]
    stored = {"columns": [{"model": "", "engine": "", "messages": messages * 50}]}
    async with console(browser, {"mini-infer-playground": json.dumps(stored)}) as (do, _, _):
        assert await do("count", selector=".message") == 100
        await do("fill_storage")
        await do("ask", text="a longer question than what may be left. " * 100)
        await do("until", selector=".talk", matches="longer than the browser stores")
        assert await do("problems") == []


async def test_one_message_is_sent_when_a_person_sends_it_twice_at_once(browser: Browser) -> None:
    async with console(browser) as (do, engine, _):
        await do("fill", label="Message", text="something")
        await do("send_twice")
        await do("until", selector=".message.assistant", matches="an answer")
        assert len(engine.bodies) == 1
        assert await do("count", selector=".message") == 2


async def test_wrong_keys_are_refused_and_a_tenant_sees_its_own_when_the_gateway_has_keys(
    browser: Browser, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text(KEYS)
    async with console(browser, keys=ApiKeys(file=tmp_path / "keys")) as (do, _, _):
        await do("key", key="sk-wrong")
        await do("until", matches="not one of this server's")
        assert "sk-wrong" not in json.dumps(await do("stored"))
        await do("key", key="sk-a")
        await do("until", selector="header", matches="key team-a")
        await do("ask", text="a secret of team a")
        await do("go", page="requests")
        await do("until", selector="table.requests", matches="/v1/chat/completions")
        assert "e1" not in await do("text", selector="body")
        await do("go", page="fleet")
        await do("until", matches="an administrator's key shows them")
        assert "sk-a" not in json.dumps((await do("stored"))["local"])
        await do("press", name="Forget key")
        await do("key", key="sk-b")
        await do("until", selector="header", matches="key team-b")
        assert "secret" not in await do("text", selector="body"), "chats of another key"
        await do("go", page="requests")
        await do("until", matches="None yet")
        await do("press", name="Forget key")
        await do("key", key="sk-ops")
        await do("go", page="fleet")
        await do("until", selector="table.engines", matches="e1")
        await do("go", page="requests")
        await do("until", selector="table.requests", matches="team-a")


async def test_the_page_asks_for_a_key_when_its_key_is_revoked(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mini_infer_gateway.console.app.SAMPLE_EVERY_S", 0.1)
    monkeypatch.setattr("mini_infer_web.api_keys.LOOK_EVERY_S", 0.0)
    (tmp_path / "keys").write_text(KEYS)
    async with console(browser, keys=ApiKeys(file=tmp_path / "keys")) as (do, _, _):
        await do("key", key="sk-a")
        await do("until", selector="header", matches="live")
        (tmp_path / "keys").write_text("sk-b name=team-b\n")
        await do("until", matches="no longer valid")
        assert "sk-a" not in json.dumps(await do("stored"))


async def test_nothing_is_asked_for_that_may_not_be_seen_when_clients_have_no_keys(browser: Browser) -> None:
    async with console(browser, host="0.0.0.0", admin_port=1) as (do, _, _):
        told = await do("ask", text="something")
        assert "an answer" in told["text"]
        assert "timeline" not in told["text"]
        for page in ("fleet", "prefixes", "requests"):
            await do("go", page=page)
        await do("until", matches="its admin port lists all")
        assert await do("problems") == []


async def test_the_docs_send_the_key_when_a_person_tries_an_operation(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def describe(self: FakeEngine, request: web.Request) -> web.StreamResponse:
        return web.Response(body=document(), content_type="application/json")

    monkeypatch.setattr(FakeEngine, "_tokenizer_info", describe)  # it answers for the description too
    (tmp_path / "keys").write_text(KEYS)
    async with console(browser, keys=ApiKeys(file=tmp_path / "keys")) as (do, _, gateway):
        await do("visit", url=gateway.url + "/docs", waits_for=".opblock")
        assert await do("count", selector=".opblock") > 5
        assert await do("try_it", key="sk-wrong", path="/v1/models") == 401
        assert await do("try_it", key="sk-a", path="/v1/models") == 200


async def test_two_models_answer_side_by_side_when_a_person_names_them(browser: Browser) -> None:
    async with FakeEngine("e2", model="other") as second, console(browser) as (do, first, gateway):
        second.chunks = stream("of the other")
        gateway.source.publish_endpoints(first.endpoint, second.endpoint)
        await do("until", selector=".talk", matches="m.*other")
        await do("check", label="Side by side")
        await do("choose", label="Model", value="other")
        await do("ask", text="something", answers=2)
        shown = await do("texts", selector=".column .message.assistant")
        assert ["an answer" in shown[0], "of the other" in shown[1]] == [True, True]


async def test_pairs_and_an_open_circuit_are_seen_when_prefill_is_apart_and_an_engine_has_gone(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mini_infer_gateway.console.app.SAMPLE_EVERY_S", 0.1)
    async with FakeEngine("e2") as second, console(browser) as (do, first, gateway):
        second.role, second.transfer = "prefill", "tcp://127.0.0.1:9"
        first.role, first.transfer = "decode", "tcp://127.0.0.1:9"
        gateway.source.publish_endpoints(first.endpoint, second.endpoint)
        await do("go", page="fleet")
        await do("until", matches="Prefill and decode apart.*e2 → e1")
        await first.stop()
        await do("go", page="chat")
        for _ in range(FAILURES_TO_OPEN):
            await do("ask", text="something")
        await do("go", page="fleet")
        await do("until", selector='[data-engine="e1"]', matches="its circuit is open: connections to it fail or break")


async def test_a_link_to_grafana_is_there_when_one_is_configured(browser: Browser) -> None:
    async with console(browser, grafana_url="https://grafana.example/d/mini-infer") as (do, _, _):
        assert 'href="https://grafana.example/d/mini-infer"' in await do("html", selector="nav")
