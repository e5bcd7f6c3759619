"""A canary at a gateway with fake engines: its share, copies, replays, and what `GET /rollouts` reports."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from mini_infer_contract.launch import Endpoint
from mini_infer_contract.rollouts import ROLLOUTS_PATH, GatewayRollouts, RevisionFigures
from mini_infer_gateway.endpoints.base import Listed, Service
from mini_infer_gateway.endpoints.canary import Canary
from mini_infer_gateway.pipeline.canary import copies
from mini_infer_gateway.pipeline.canary.figures import WARM_UP
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import RunningGateway, running_gateway, until

SERVICE = "default/demo"
ANSWER = [1, 2, 3, 4]


class ScoringEngine(FakeEngine):
    """Answers with token ids, and scores every token with the same log probability."""

    def __init__(self, name: str, revision: str, logprob: float = -1.0) -> None:
        super().__init__(name)
        self.revision, self.logprob = revision, logprob
        self.scores = True

    @property
    def endpoint(self) -> Endpoint:
        return msgspec.structs.replace(super().endpoint, service=SERVICE)

    async def _answer(self, request: web.Request, raw: bytes) -> web.StreamResponse:
        body: dict[str, Any] = json.loads(raw)
        if body.get("return_token_ids") and not body.get("stream"):
            choice = {"token_ids": ANSWER[: body["max_tokens"]]}
            return web.json_response({"choices": [choice], "prompt_token_ids": [7, 8, 9]})
        if "prompt_logprobs" in body:
            if not self.scores:
                return web.json_response({"error": {"message": "token 4 is out of range"}}, status=400)
            scored = [{str(token): {"logprob": self.logprob}} for token in body["prompt"]]
            return web.json_response({"choices": [{"prompt_logprobs": [None, *scored[1:]]}]})
        return await super()._answer(request, raw)


@asynccontextmanager
async def rollout(canary: Canary, old: FakeEngine, new: FakeEngine, **settings: Any) -> AsyncIterator[RunningGateway]:
    async with running_gateway(**settings) as gateway:
        publish(gateway, canary, old, new)
        await gateway.settled()
        yield gateway


def publish(gateway: RunningGateway, canary: Canary | None, *engines: FakeEngine) -> None:
    gateway.source.publish([Listed(engine.endpoint) for engine in engines], [Service(SERVICE, "", "m", False, canary)])


async def figures(gateway: RunningGateway) -> dict[str, RevisionFigures]:
    async with gateway.client.get(gateway.url + ROLLOUTS_PATH) as response:
        assert response.status == 200
        return msgspec.json.decode(await response.read(), type=GatewayRollouts).services[SERVICE]


async def chats(gateway: RunningGateway, count: int, **fields: object) -> list[int]:
    found = []
    for number in range(count):
        async with gateway.chat(f"question {number}", **fields) as response:
            await response.read()
            found.append(response.status)
    return found


@pytest.fixture
async def engines() -> AsyncIterator[tuple[ScoringEngine, ScoringEngine]]:
    async with ScoringEngine("old", "r1") as old, ScoringEngine("new", "r2") as new:
        yield old, new


Pair = tuple[ScoringEngine, ScoringEngine]


async def test_requests_are_shared_and_counted_by_revision_when_a_canary_has_a_weight(engines: Pair) -> None:
    old, new = engines
    async with rollout(Canary("r2", 0.5), old, new) as gateway:
        assert set(await chats(gateway, 60, stream=True)) == {200}
        found = await figures(gateway)
        by_session = []
        for session in ("x", "y", "z"):
            before = len(new.bodies)
            await chats(gateway, 6, user=session)
            by_session.append(len(new.bodies) - before)
    assert {found["r1"].requests, found["r2"].requests} != {0}
    assert (found["r1"].requests + found["r2"].requests, found["r1"].errors, found["r2"].errors) == (60, 0, 0)
    assert 12 <= found["r2"].requests <= 48
    assert sum(found["r2"].ttft_counts) == found["r2"].requests - WARM_UP
    assert set(by_session) <= {0, 6}, "a session stays with its revision"


async def test_requests_of_a_failing_canary_are_answered_by_the_old_revision(engines: Pair) -> None:
    old, new = engines
    new.status = 500
    async with rollout(Canary("r2", 1.0), old, new) as gateway:
        assert set(await chats(gateway, 20)) == {200}
        found = await figures(gateway)
    assert found["r2"].errors == found["r2"].requests > 0
    assert found["r1"].errors == 0


async def test_copies_are_sent_after_the_answer_and_dropped_when_traffic_is_mirrored(engines: Pair) -> None:
    old, new = engines
    async with rollout(Canary("r2", mirror=1.0), old, new) as gateway:
        async with gateway.chat("hello", temperature=0.5) as response:
            assert (await response.json())["served_by"] == "old"
        await until(lambda: len(new.bodies) == 1)
        await chats(gateway, WARM_UP + 3, stream=True)
        await until(lambda: len(new.bodies) == WARM_UP + 4)
        await until(lambda: not gateway.app._copies._tasks)
        found = await figures(gateway)
    copy = json.loads(new.bodies[0])
    assert (copy["messages"][0]["content"], copy["temperature"], copy["priority"]) == ("hello", 0.5, 1_000_000)
    assert new.headers[0]["x-request-id"].startswith("canary-")
    assert (found["r2"].requests, found["r2"].copies, found["r2"].errors) == (WARM_UP + 4, WARM_UP + 4, 0)
    assert sum(found["r2"].ttft_counts) == 3


@pytest.mark.parametrize(("status", "errors"), [(500, 1), (400, 1), (429, 0)])
async def test_copies_that_fail_count_against_the_canary_alone(engines: Pair, status: int, errors: int) -> None:
    old, new = engines
    new.status = status
    async with rollout(Canary("r2", mirror=1.0), old, new) as gateway:
        assert await chats(gateway, 1) == [200]
        await until(lambda: len(new.bodies) == 1)
        await until(lambda: not gateway.app._copies._tasks)
        assert gateway.app.fleet.endpoints["new"].breaker.closed
        found = await figures(gateway)
    assert found["r2"].errors == errors if errors else "r2" not in found or not found["r2"].requests
    assert found["r1"].requests == 1


async def test_copies_are_bounded_when_the_canary_hangs(engines: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = engines
    new.hang = True
    monkeypatch.setattr(copies, "MAX_COPIES", 3)
    async with rollout(Canary("r2", mirror=1.0), old, new) as gateway:
        assert set(await chats(gateway, 12)) == {200}
        await until(lambda: len(new.bodies) == 3)
        assert gateway.app._copies._retained == 3
    assert len(new.bodies) == 3


async def test_nothing_is_copied_when_the_answer_is_an_error(engines: Pair) -> None:
    old, new = engines
    old.status = 400
    async with rollout(Canary("r2", mirror=1.0, replay=True), old, new) as gateway:
        assert await chats(gateway, 2) == [400, 400]
        assert gateway.app._copies._retained == 0
        assert (await figures(gateway))["r1"].rejected == 2
    assert not new.bodies


async def test_answers_are_scored_by_both_revisions_when_they_are_replayed(engines: Pair) -> None:
    old, new = engines
    new.logprob = -1.25
    async with rollout(Canary("r2", replay=True), old, new) as gateway:
        assert set(await chats(gateway, 3)) == {200}
        await until(lambda: not gateway.app._copies._tasks)
        found = await figures(gateway)
    assert (found["r2"].replays, found["r2"].divergence_sum, found["r2"].unscored) == (1, 0.25, 0)
    scored = json.loads(new.bodies[-1])
    assert scored["prompt"] == [7, 8, 9, *ANSWER]
    assert sum(found["r2"].divergence_counts) == 1
    assert found["r2"].requests == 0


async def test_an_answer_counts_as_unscored_when_the_new_revision_refuses_it(engines: Pair) -> None:
    old, new = engines
    new.scores = False
    async with rollout(Canary("r2", replay=True), old, new) as gateway:
        await chats(gateway, 1)
        await until(lambda: not gateway.app._copies._tasks)
        found = await figures(gateway)
    assert (found["r2"].replays, found["r2"].unscored) == (0, 1)


async def test_a_revision_that_was_rolled_back_gets_nothing(engines: Pair) -> None:
    old, new = engines
    async with rollout(Canary("r2", 0.0), old, new, routing="round-robin") as gateway:
        assert set(await chats(gateway, 30)) == {200}
        assert not new.bodies
        publish(gateway, None, old, new)
        await chats(gateway, 4)
        async with gateway.client.get(gateway.url + ROLLOUTS_PATH) as response:
            assert (await response.json())["services"] == {}
    assert new.bodies, "without a canary all revisions are equal"


async def test_memory_of_engines_is_reported_by_revision(engines: Pair) -> None:
    old, new = engines
    async with rollout(Canary("r2"), old, new) as gateway:
        await new.report(memory_bytes=4096)
        await until(lambda: gateway.app.ledger.memory_bytes("new") == 4096)
        assert (await figures(gateway))["r2"].memory_bytes == {"new": 4096}
