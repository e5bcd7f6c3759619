"""Streams that go on where their engine died: the bytes alone, and real dry-run engines that are killed."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
import pytest

from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.endpoints.base import Listed, Service
from mini_infer_gateway.endpoints.canary import Canary
from mini_infer_gateway.pipeline.continuation.base import DONE, Continuation, can_be_continued, split_engine_death
from mini_infer_gateway.pipeline.stages import resume
from tests.engine.server.dry_server import HANG_S, environment, free_port, serve_command
from tests.gateway.test_metrics import value
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import RunningGateway, running_gateway, until

CHAT: dict[str, Any] = {"messages": [], "stream": True}
TEXT = {"stream": True, "prompt": "a"}


@pytest.mark.parametrize(
    ("fields", "possible"),
    [
        (CHAT, True),
        (CHAT | {"n": 1, "logprobs": False, "seed": None}, True),
        (TEXT, True),
        (TEXT | {"prompt": [1, 2]}, True),
        (TEXT | {"prompt": ["a", "b"]}, False),
        (TEXT | {"prompt": [[1, 2]]}, False),
        (CHAT | {"stream": False}, False),
        (CHAT | {"n": 2}, False),
        (CHAT | {"logprobs": True, "top_logprobs": 2}, True),
        (TEXT | {"logprobs": 0}, True),
        (TEXT | {"logprobs": 2}, True),
        (TEXT | {"logprobs": 2, "echo": True}, False),
        (CHAT | {"prompt_logprobs": 1}, False),
        (CHAT | {"resume_token_ids": [1]}, False),
    ],
)
def test_streams_can_be_continued_by_their_fields(fields: dict[str, Any], possible: bool) -> None:
    assert can_be_continued(fields) == possible


def chunk(body: str, ids: str, finish: str = "null") -> bytes:
    end = f'"logprobs":null,"finish_reason":{finish},"token_ids":[{ids}]'
    return f'data: {{"id":"x","choices":[{{"index":0,{body},{end}}}]}}\n\n'.encode()


ROLE = chunk('"delta":{"role":"assistant","content":"","refusal":null}', "")
HALF = chunk('"delta":{"content":""}', "7")
EVENTS = chunk('"delta":{"content":"data: {,\\"token_ids\\":[1]"}', "8,9")
END = chunk('"delta":{}', "10", '"stop","stop_reason":null')
USAGE = b'data: {"id":"x","choices":[],"usage":{"total_tokens":3}}\n\n'


def without_ids(event: bytes) -> bytes:
    head, _, rest = event.rpartition(b',"token_ids":[')
    return head + rest[rest.index(b"]") + 1 :]


def test_token_ids_are_removed_from_the_stream_when_the_client_did_not_request_them() -> None:
    stream = Continuation.of({}, 5)
    assert json.loads(stream.body(b'{"model":"m"} ')) == {
        "model": "m",
        "seed": 5,
        "return_token_ids": True,
        "return_prompt_token_ids": False,
    }
    reported = stream.take(ROLE) + stream.take(HALF + EVENTS) + stream.take(END + USAGE + DONE)
    assert reported == without_ids(ROLE) + without_ids(EVENTS) + without_ids(END) + USAGE + DONE
    assert stream.finished
    assert stream.done
    assert stream.possible
    assert json.loads(stream.body(b'{"model":"m"}'))["resume_token_ids"] == [7, 8, 9, 10]


@pytest.mark.parametrize("event", [ROLE, HALF, EVENTS, END, USAGE, DONE, without_ids(EVENTS)])
def test_continuation_handles_a_lone_event_as_it_does_among_others(event: bytes) -> None:
    """Lone events go the short way, which must not be another one."""
    alone, among = Continuation.of({}, 5), Continuation.of({}, 5)
    reported = alone.take(EVENTS) + alone.take(event)
    assert among.take(EVENTS + event) == reported
    assert (alone.finished, alone.done, alone.possible) == (among.finished, among.done, among.possible)
    assert alone.body(b"{}") == among.body(b"{}")


def test_seed_and_token_ids_are_kept_when_the_client_requested_them() -> None:
    stream = Continuation.of({"seed": 0, "return_token_ids": True}, 5)
    assert stream.body(b'{"seed":0,"return_token_ids":true}') == b'{"seed":0,"return_token_ids":true}'
    assert stream.take(ROLE + HALF) == ROLE + HALF


def test_first_and_last_events_are_sent_once_when_a_stream_is_continued() -> None:
    stream = Continuation.of({}, 5)
    stream.body(b"{}")
    stream.take(ROLE)
    stream.body(b"{}")
    assert stream.take(ROLE + EVENTS) == without_ids(EVENTS), "begun anew before any token"
    stream.take(END)
    stream.body(b"{}")
    assert stream.take(END + USAGE) == USAGE
    stream.body(b"{}")
    assert stream.take(END + USAGE + DONE) == DONE


def test_a_stream_cannot_be_continued_when_the_engine_sends_no_token_ids() -> None:
    stream = Continuation.of({}, 5)
    stream.take(without_ids(EVENTS))
    assert not stream.possible


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (EVENTS, (EVENTS, False)),
        (EVENTS + b'data: {"error":{"code":"engine_dead"}}\n\n', (EVENTS, True)),
        (EVENTS + b'data: {"error":{"code":"stopping"}}\n\n', (EVENTS, True)),
        (b'data: {"error":{"code":"other"}}\n\n', (b'data: {"error":{"code":"other"}}\n\n', False)),
        (EVENTS + b'event: error\ndata: {"error":{"code":"engine_dead"}}\n\n', (EVENTS, True)),
    ],
)
def test_the_error_event_of_a_dead_engine_is_not_forwarded(events: bytes, expected: tuple[bytes, bool]) -> None:
    assert split_engine_death(events) == expected


DRY = ("--dry-run", "--dry-run-step-ms", "10")
DEMO = ("--model", "demo", "--device", "cpu")


class Engine:
    """An engine on ports that stay, a dry-run unless its flags say otherwise."""

    def __init__(self, name: str, *flags: str) -> None:
        self.name, self.ports = name, [free_port() for _ in range(3)]
        self._flags = flags or DRY
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> Endpoint:
        http, events, replay = (f"127.0.0.1:{port}" for port in self.ports)
        return Endpoint(
            name=self.name, url=f"http://{http}", model="dry", events=f"tcp://{events}", replay=f"tcp://{replay}"
        )

    def start(self) -> None:
        """Starts the process, unless it runs."""
        if self.process is not None and self.process.poll() is None:
            return
        http, events, replay = map(str, self.ports)
        flags = ("--port", http, "--events-port", events, "--replay-port", replay, *self._flags)
        command = serve_command("--served-model-name", "dry", *flags)
        self.process = subprocess.Popen(
            command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    async def ready(self) -> None:
        """Waits until it serves."""
        async with asyncio.timeout(HANG_S), aiohttp.ClientSession() as client:
            for _ in range(10_000):
                with contextlib.suppress(aiohttp.ClientError):
                    async with client.get(self.endpoint.url + "/readyz") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.05)

    def kill_core(self) -> None:
        """Kills the core alone: the server says so in each stream, and ends a moment later."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


EngineT = TypeVar("EngineT", bound=Engine)


@asynccontextmanager
async def serving(*engines: Engine) -> AsyncIterator[tuple[Engine, ...]]:
    """Starts those of a module's engines that an earlier test has killed."""
    for engine in engines:
        engine.start()
    for engine in engines:
        await engine.ready()
    yield engines


@contextlib.contextmanager
def killed_at_the_end(engines: Sequence[EngineT]) -> Iterator[Sequence[EngineT]]:
    """Kills those of the engines that run when the block ends."""
    try:
        yield engines
    finally:
        for engine in engines:
            engine.kill()


@pytest.fixture(scope="module")
def dry_engines() -> Iterator[Sequence[Engine]]:
    """Returns two dry-run engines, which tests start with `serving` and kill."""
    with killed_at_the_end([Engine(name) for name in "ab"]) as engines:
        yield engines


@pytest.fixture(scope="module")
def engines_without_tokenizer() -> Iterator[Sequence[Engine]]:
    """Returns two engines that take token ids alone, as `dry_engines`."""
    with killed_at_the_end([Engine(name, *DRY, "--skip-tokenizer-init") for name in "ab"]) as engines:
        yield engines


@pytest.fixture(scope="module")
def demo_engines() -> Iterator[Sequence[Engine]]:
    """Returns three engines of the demo model, as `dry_engines`."""
    with killed_at_the_end([Engine(name, *DEMO) for name in "abc"]) as engines:
        yield engines


async def reported(gateway: RunningGateway, question: str, **fields: object) -> tuple[str, list[dict[str, Any]]]:
    """The text of a stream and its events; it must end as streams end."""
    async with gateway.chat(question, stream=True, model="dry", **fields) as response:
        assert response.status == 200
        body = (await response.read()).decode()
    assert body.endswith("data: [DONE]\n\n"), body[-300:]
    events = [json.loads(event.removeprefix("data: ")) for event in body.split("\n\n")[:-2]]
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert [delta.get("role") for delta in deltas].count("assistant") == 1
    assert "token_ids" not in body
    return "".join(delta.get("content", "") for delta in deltas), events


Answer = TypeVar("Answer")


async def cut(
    gateway: RunningGateway,
    engines: Sequence[Engine],
    begin: Callable[[int], Awaitable[Answer]],
    kill: Callable[[Engine], None] = Engine.kill,
    streams: int = 1,
    after_s: float = 0.0,
) -> list[Answer]:
    """Kills an engine while it sends streams, and returns the answers once a stream was continued by another one.

    `after_s` is the time from the beginning of the streams to the kill, for tokens to be sent meanwhile.
    Streams begin anew, with the engine back, where they had ended before anybody looked: on a busy machine they may.
    """
    states = gateway.app.fleet.endpoints
    before = value(gateway, "continuations_total", outcome="whole")
    for _ in range(10):
        pending = [asyncio.ensure_future(begin(number)) for number in range(streams)]
        await until(
            lambda pending=pending: (  # type: ignore[misc]
                sum(len(state.streaming) for state in states.values()) == streams or any(one.done() for one in pending)
            )
        )
        await asyncio.sleep(after_s)
        victim = next((engine for engine in engines if states[engine.name].streaming), None)
        if victim is not None:
            kill(victim)
        answers = await asyncio.gather(*pending)
        assert value(gateway, "continuations_total", outcome="broke") == 0
        if victim is not None:
            victim.kill()
        if value(gateway, "continuations_total", outcome="whole") > before:
            return list(answers)
        if victim is not None:
            victim.start()
            await victim.ready()
            await until(lambda name=victim.name: states[name].breaker.closed)  # type: ignore[misc]
            await gateway.settled()
    raise AssertionError("no stream was cut in ten attempts")


QUESTION = "é€😀 What is lost when an engine dies in the middle of an answer, and who tells? "


async def test_streams_complete_when_engines_are_killed_repeatedly(dry_engines: Sequence[Engine]) -> None:
    async with serving(*dry_engines) as running, running_gateway(*(engine.endpoint for engine in running)) as gateway:
        await gateway.settled()
        pending = True
        answers: list[tuple[str, str, list[dict[str, Any]]]] = []

        async def keep_sending(client: int) -> None:
            number = 0
            while pending:
                question = f"{client}/{number}: {QUESTION}"
                usage = {"stream_options": {"include_usage": True}} if client % 2 else {}
                answers.append((question, *await reported(gateway, question, temperature=1.0, **usage)))
                number += 1

        clients = [asyncio.create_task(keep_sending(number)) for number in range(8)]
        dice = random.Random(1)
        for round_ in range(2):
            victim = running[round_ % 2]
            before = len(answers)
            await until(lambda before=before: len(answers) >= before + 2 or any(c.done() for c in clients))  # type: ignore[misc]
            await asyncio.sleep(dice.uniform(0.1, 0.5))
            if round_ == 0:
                victim.kill_core()  # Its HTTP server says so inside of each stream before it ends as well.
                await asyncio.sleep(0.3)
            victim.kill()
            victim.start()
            await victim.ready()
            breaker = gateway.app.fleet.endpoints[victim.name].breaker
            await until(lambda breaker=breaker: breaker.closed)  # type: ignore[misc]
        pending = False
        async with asyncio.timeout(60.0):
            await asyncio.gather(*clients)
        for question, text, events in answers:
            assert text == f"You said: {question}"
            if events[-1]["choices"] == []:
                assert events[-1]["usage"]["completion_tokens"] == len(text.encode()) + 1
        exported = gateway.app.metrics.text().decode()
        assert 'continuations_total{outcome="whole"}' in exported
        assert 'continuations_total{outcome="broke"}' not in exported


async def message(gateway: RunningGateway, question: str) -> list[dict[str, Any]]:
    """The events of a stream of Anthropic's API."""
    body = {"model": "dry", "max_tokens": 500, "stream": True, "messages": [{"role": "user", "content": question}]}
    async with gateway.client.post(gateway.url + "/v1/messages", json=body) as response:
        assert response.status == 200
        events = (await response.read()).decode().split("\n\n")[:-1]
    return [json.loads(event.partition("data: ")[2]) for event in events]


@pytest.mark.parametrize("loss", ["core", "all"])
async def test_an_anthropic_stream_is_continued_when_its_engine_dies(loss: str, dry_engines: Sequence[Engine]) -> None:
    async with serving(*dry_engines) as running, running_gateway(*(engine.endpoint for engine in running)) as gateway:
        await gateway.settled()
        kill = Engine.kill_core if loss == "core" else Engine.kill
        answers = await cut(gateway, running, lambda number: message(gateway, f"{number}: {QUESTION}"), kill, streams=4)
        for number, events in enumerate(answers):
            kinds = [event["type"] for event in events]
            assert kinds[:3] == ["message_start", "ping", "content_block_start"]
            assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
            assert set(kinds[3:-3]) == {"content_block_delta"}
            text = "".join(event["delta"]["text"] for event in events[3:-3])
            assert text == f"You said: {number}: {QUESTION}"
            assert events[-2]["usage"]["output_tokens"] == len(text.encode()) + 1


async def response_of(gateway: RunningGateway, question: str) -> list[dict[str, Any]]:
    """The events of a stream of OpenAI's Responses API."""
    body = {"model": "dry", "stream": True, "input": question}
    async with gateway.client.post(gateway.url + "/v1/responses", json=body) as response:
        assert response.status == 200
        events = (await response.read()).decode().split("\n\n")[:-1]
    return [json.loads(event.partition("data: ")[2]) for event in events]


async def test_a_responses_stream_is_continued_when_its_engine_dies(dry_engines: Sequence[Engine]) -> None:
    async with serving(*dry_engines) as running, running_gateway(*(engine.endpoint for engine in running)) as gateway:
        await gateway.settled()

        def begin(number: int) -> Awaitable[list[dict[str, Any]]]:
            return response_of(gateway, f"{number}: {QUESTION}")

        answers = await cut(gateway, running, begin, Engine.kill_core, streams=4, after_s=0.2)
        for number, events in enumerate(answers):
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
            last = events[-1]
            assert last["type"] == "response.completed"
            assert text == f"You said: {number}: {QUESTION}" == last["response"]["output"][0]["content"][0]["text"]
            assert last["response"]["created_at"] == events[0]["response"]["created_at"]
            assert last["response"]["id"] == events[0]["response"]["id"]
            assert {event["item_id"] for event in events if "item_id" in event} == {last["response"]["output"][0]["id"]}
            assert last["response"]["usage"]["output_tokens"] == len(text.encode()) + 1
        assert len(gateway.app.responses.store) % 4 == 0


TOKENS = 200


def joined_logprobs(kind: str, events: list[dict[str, Any]]) -> list[Any]:
    """Each token's name with its log probability and, of a completion, its offset."""
    found = [event["choices"][0]["logprobs"] for event in events if event["choices"]]
    if kind == "chat":
        return [(entry["token"], entry["bytes"]) for logprobs in found if logprobs for entry in logprobs["content"]]
    return [(*entry,) for of in found if of for entry in zip(of["tokens"], of["text_offset"], strict=True)]


async def logprobs_of(gateway: RunningGateway, kind: str) -> list[Any]:
    """What a stream with log probabilities told of its tokens."""
    body: dict[str, Any] = {"model": "dry", "stream": True, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    if kind == "chat":
        path = "/v1/chat/completions"
        body |= {"messages": [{"role": "user", "content": QUESTION}], "logprobs": True, "top_logprobs": 1}
    else:
        path = "/v1/completions"
        body |= {"prompt": QUESTION, "logprobs": 1}
    async with gateway.client.post(gateway.url + path, json=body) as response:
        assert response.status == 200
        events = (await response.read()).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return joined_logprobs(kind, [json.loads(event.removeprefix("data: ")) for event in events[:-2]])


async def test_logprobs_are_sent_once_each_when_a_stream_is_continued(demo_engines: Sequence[Engine]) -> None:
    async with (
        serving(*demo_engines) as running,
        running_gateway(*(engine.endpoint for engine in running)) as gateway,
    ):
        await gateway.settled()
        for kind in ("chat", "completion"):
            undisturbed = await logprobs_of(gateway, kind)
            assert len(undisturbed) == TOKENS
            assert await cut(gateway, running, lambda _, kind=kind: logprobs_of(gateway, kind)) == [undisturbed]  # type: ignore[misc]


async def texts_of_choices(gateway: RunningGateway, path: str, body: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    """Text and, where they are told, names of tokens of each choice, each of which must begin and end once."""
    common = {"model": "dry", "stream": True, "max_tokens": 60, "ignore_eos": True, "temperature": 1.0, "seed": 7}
    async with gateway.client.post(gateway.url + path, json=common | body) as response:
        assert response.status == 200
        events = (await response.read()).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""], events[-3:]
    assert "token_ids" not in "".join(events)
    found: dict[int, list[dict[str, Any]]] = {}
    for event in events[:-2]:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            found.setdefault(choice["index"], []).append(choice)
    for choices in found.values():
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
        assert sum("role" in choice.get("delta", ()) for choice in choices) == ("chat" in path)
    return [
        (
            "".join(choice.get("text") or choice.get("delta", {}).get("content", "") or "" for choice in choices),
            [of["tokens"] if "tokens" in of else of["content"] for c in choices if (of := c["logprobs"])],
        )
        for _, choices in sorted(found.items())
    ]


SEVERAL: dict[str, tuple[str, dict[str, Any]]] = {
    "choices": ("/v1/chat/completions", {"messages": [{"role": "user", "content": QUESTION}], "n": 3}),
    "prompts": ("/v1/completions", {"prompt": [QUESTION, "Another one: "], "n": 2}),
    "echo": ("/v1/completions", {"prompt": QUESTION, "echo": True, "logprobs": 1}),
}


async def test_streams_of_several_choices_are_replayed_when_their_engine_dies(demo_engines: Sequence[Engine]) -> None:
    async with (
        serving(*demo_engines[:2]) as running,
        running_gateway(*(engine.endpoint for engine in running)) as gateway,
    ):
        await gateway.settled()
        endpoints = gateway.app.fleet.endpoints
        for path, body in SEVERAL.values():
            undisturbed = await texts_of_choices(gateway, path, body)
            assert len({text for text, _ in undisturbed}) == len(undisturbed)
            found = await cut(gateway, running, lambda _, path=path, body=body: texts_of_choices(gateway, path, body))  # type: ignore[misc]
            assert found == [undisturbed]
            for victim in running:
                victim.start()
                await victim.ready()
                await until(lambda name=victim.name: endpoints[name].breaker.closed)  # type: ignore[misc]
            await gateway.settled()


async def test_a_responses_stream_with_logprobs_is_replayed_when_its_engine_dies(
    demo_engines: Sequence[Engine],
) -> None:
    async def stream_once() -> tuple[str, list[Any], list[Any]]:
        body = {"model": "dry", "stream": True, "input": QUESTION, "max_output_tokens": 60, "temperature": 0}
        body |= {"include": ["message.output_text.logprobs"]}
        async with gateway.client.post(gateway.url + "/v1/responses", json=body) as response:
            assert response.status == 200
            raw = (await response.read()).decode()
        events = [json.loads(event.partition("data: ")[2]) for event in raw.split("\n\n")[:-1]]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        reported = [one for event in events if event["type"].endswith("text.delta") for one in event["logprobs"]]
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
        content = events[-1]["response"]["output"][0]["content"][0]
        return content["text"], reported, content["logprobs"]

    def tokens(logprobs: list[Any]) -> list[str]:
        return [one["token"] for one in logprobs]

    async with (
        serving(*demo_engines[:2]) as running,
        running_gateway(*(engine.endpoint for engine in running)) as gateway,
    ):
        await gateway.settled()
        text, reported, whole = await stream_once()
        assert tokens(reported) == tokens(whole) != []
        (again,) = await cut(gateway, running, lambda _: stream_once())
        assert (again[0], tokens(again[1]), tokens(again[2])) == (text, tokens(reported), tokens(whole))


async def ids_of(gateway: RunningGateway, **more: object) -> list[dict[str, Any]]:
    """The events of a completion of token ids."""
    body = {"model": "dry", "stream": True, "prompt": list(range(40, 140)), "max_tokens": 80} | more
    async with gateway.client.post(gateway.url + "/v1/completions", json=body) as response:
        assert response.status == 200
        assert response.headers["x-mini-infer-index"] == "exact"
        events = (await response.read()).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]


@pytest.mark.parametrize("requests_ids", [True, False])
async def test_a_stream_is_continued_when_engines_have_no_tokenizer(
    requests_ids: bool, engines_without_tokenizer: Sequence[Engine]
) -> None:
    more = {"return_token_ids": True} if requests_ids else {}
    async with (
        serving(*engines_without_tokenizer) as running,
        running_gateway(*(engine.endpoint for engine in running)) as gateway,
    ):
        await gateway.settled()
        undisturbed = await ids_of(gateway, **more)
        assert len(undisturbed) == 80, "one event a token, though there is no text"
        assert await cut(gateway, running, lambda _: ids_of(gateway, **more), after_s=0.2) == [undisturbed]


async def test_a_stream_is_continued_when_the_only_engine_restarts(
    dry_engines: Sequence[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "CONTINUATION_WAIT_S", HANG_S)
    async with serving(dry_engines[0]) as (engine,), running_gateway(engine.endpoint) as gateway:
        await gateway.settled()

        def restart(engine: Engine) -> None:
            engine.kill()
            engine.start()

        ((text, _),) = await cut(gateway, [engine], lambda _: reported(gateway, QUESTION * 2), restart)
        assert text == f"You said: {QUESTION * 2}"


@pytest.mark.parametrize("weight", [1.0, 0.0], ids=["judged", "rolled back"])
async def test_a_stream_of_a_canary_is_continued_by_the_old_revision_when_its_only_engine_dies(
    weight: float, dry_engines: Sequence[Engine]
) -> None:
    async with serving(*dry_engines) as (old, new), running_gateway() as gateway:
        listed = [
            Listed(msgspec.structs.replace(engine.endpoint, service="default/dry", revision=engine.name))
            for engine in (old, new)
        ]

        def publish(share: float) -> None:
            service = Service("default/dry", "", "dry", canary=Canary(new.name, share))
            gateway.source.publish(listed, [service])

        publish(1.0)
        await gateway.settled()
        pending = asyncio.create_task(reported(gateway, QUESTION * 2))
        await until(lambda: bool(gateway.app.fleet.endpoints[new.name].streaming) or pending.done())
        publish(weight)
        new.kill()
        text, _ = await pending
        assert text == f"You said: {QUESTION * 2}"


async def test_the_client_gets_an_error_event_when_continuation_is_off() -> None:
    async with FakeEngine("a") as dying, FakeEngine("b") as good:
        dying.chunks = [ROLE, EVENTS, END]
        dying.die_after, dying.chunk_delay_s = 2, 0.02
        endpoints = (dying.endpoint, good.endpoint)
        async with running_gateway(*endpoints, routing="round-robin", continuation=False) as gateway:
            await gateway.settled()
            async with gateway.chat("hi", stream=True) as response:
                body = await response.read()
        assert b'"return_token_ids"' not in dying.bodies[0]
        assert b"endpoint_failed" in body


async def test_it_is_counted_and_logged_once_when_memory_is_too_short_to_continue_streams(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        gateway.app.fleet.endpoints["a"].subscriber.resumes = True
        bodies = gateway.app.bodies
        assert bodies.take(bodies._limit_bytes * 3 // 4)
        for _ in range(3):
            async with gateway.chat("hi", stream=True) as response:
                await response.read()
        bodies.give_back(bodies._limit_bytes * 3 // 4)
        async with gateway.chat("hi", stream=True) as response:
            await response.read()
        assert "mini_infer_gateway_continuation_off_total 3.0" in gateway.app.metrics.text().decode()
    assert len([record for record in caplog.records if "are not continued" in record.message]) == 1
