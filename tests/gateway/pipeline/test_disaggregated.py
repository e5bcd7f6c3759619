"""Prefill and decode engines as processes behind a gateway, keys and values moved by NIXL, and what kills them.

The engines' model is pretended, their pages are not: a reply is read from the pages that the prompt was written into,
so a page that did not come changes the text.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from mini_infer_contract.launch import Endpoint
from tests.engine.server.dry_server import free_port
from tests.gateway.pipeline.continuation.test_base import QUESTION, Engine, killed_at_the_end, reported, serving
from tests.gateway.test_metrics import value
from tests.support.running_gateway import RunningGateway, running_gateway, until

pytest.importorskip("nixl_cu13", reason="keys and values move by NIXL: install the extra disaggregated")


class Side(Engine):
    """An engine with a role and a transfer port."""

    def __init__(self, name: str, role: str) -> None:
        self.role, self.transfer_port = role, free_port()
        transfer = ("--role", role, "--transfer-port", str(self.transfer_port), "--kv-transfer-trust", "clients")
        super().__init__(name, "--dry-run", "--dry-run-step-ms", "10", *transfer)

    @property
    def endpoint(self) -> Endpoint:
        transfer = f"tcp://127.0.0.1:{self.transfer_port}"
        return msgspec.structs.replace(super().endpoint, role=self.role, transfer=transfer)

    async def metric(self, series: str) -> float:
        """The sum of what begins so in its metrics."""
        async with aiohttp.ClientSession() as client, client.get(self.endpoint.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(series))

    async def sent(self) -> float:
        return await self.metric('mini_infer_engine_kv_transfers_total{direction="given"}')


@asynccontextmanager
async def fleet(*sides: Side, **settings: Any) -> AsyncIterator[RunningGateway]:
    """Engines that are ready, and known to a gateway by their load reports; those that are not running are started."""
    async with (
        serving(*sides),
        running_gateway(*(side.endpoint for side in sides), **settings) as gateway,
    ):
        await gateway.settled()
        await until(lambda: all(reporting(gateway, side) for side in sides))
        yield gateway


def reporting(gateway: RunningGateway, side: Side) -> bool:
    return gateway.app.fleet.endpoints[side.name].is_reporting(gateway.app._clock())


@pytest.fixture(scope="module")
def sides() -> Iterator[Sequence[Side]]:
    """Returns a prefill engine and two decode engines, which tests start with `fleet` and kill."""
    with killed_at_the_end([Side("p", "prefill"), Side("d1", "decode"), Side("d2", "decode")]) as engines:
        yield engines


async def test_streams_complete_when_a_prefill_and_a_decode_engine_are_killed(sides: Sequence[Side]) -> None:
    """Everything goes apart; then the one prefill engine is killed and comes back, and a decode engine is killed."""
    prefill, first, second = sides
    async with fleet(prefill, first, second, max_local_prefill_tokens=0) as gateway:
        already_sent = await prefill.sent()
        pending = True
        answers: list[tuple[str, str]] = []

        async def keep_sending(client: int) -> None:
            number = 0
            while pending:
                question = f"{client}/{number}: {QUESTION}"
                answers.append((question, (await reported(gateway, question, temperature=1.0))[0]))
                number += 1

        async def more_answers(count: int) -> None:
            expected = len(answers) + count
            await until(lambda: len(answers) >= expected or any(client.done() for client in clients))
            for client in clients:
                assert not client.done(), client.exception()

        clients = [asyncio.create_task(keep_sending(number)) for number in range(8)]
        while await prefill.sent() < already_sent + 4:
            await more_answers(1)
        prefill.kill()
        await until(lambda: value(gateway, "prefill_placements_total", reason="no_prefill_endpoint") > 0)
        await more_answers(8)
        prefill.start()
        await prefill.ready()
        await until(lambda: reporting(gateway, prefill))
        while not await prefill.sent():  # what was sent before it came back goes on without it
            await more_answers(1)
        num_sent = await prefill.sent()
        await more_answers(8)
        while await prefill.sent() <= num_sent:  # until it is asked again
            await more_answers(1)
        first.kill()
        await more_answers(8)
        pending = False
        async with asyncio.timeout(60.0):
            await asyncio.gather(*clients)
        assert {text == f"You said: {question}" for question, text in answers} == {True}
        assert value(gateway, "continuations_total", outcome="broke") == 0
        assert value(gateway, "continuations_total", outcome="whole") > 0
        # What was counted at the prefill engine is settled, whatever became of it.
        assert gateway.app.ledger.in_flight("p") == 0


async def test_a_prefill_engines_load_reports_name_the_requests_it_has_received(sides: Sequence[Side]) -> None:
    """Else the gateway would count a prompt twice: by its own word, and as a part of the engine's queue."""
    prefill, _, decode = sides
    async with fleet(prefill, decode, max_local_prefill_tokens=0) as gateway:
        accepted: list[str] = []
        take = gateway.app.ledger.on_report

        def note(endpoint: str, report: Any) -> None:
            if endpoint == "p":
                accepted.extend(report.accepted)
            take(endpoint, report)

        gateway.app.ledger.on_report = note
        async with gateway.client.post(
            gateway.url + "/v1/chat/completions",
            json={"model": "dry", "messages": [{"role": "user", "content": QUESTION}]},
            headers={"x-request-id": "the-clients-own"},
        ) as response:
            assert response.status == 200
            assert response.headers["x-mini-infer-prefill-pod"] == "p"
        await until(lambda: bool(accepted))
        assert accepted == ["the-clients-own"]


async def test_a_decode_engine_gets_more_requests_when_transferred_prompts_are_on_their_way(
    sides: Sequence[Side],
) -> None:
    """They hold its pages and run; were they taken for waiting ones, only two at once would be sent."""
    prefill, _, decode = sides
    async with fleet(prefill, decode, max_local_prefill_tokens=0) as gateway:
        pending = [asyncio.create_task(reported(gateway, f"{number}: {QUESTION}")) for number in range(24)]
        most = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60.0):
                while not all(task.done() for task in pending):
                    most = max(most, gateway.app.backlog.depth("dry"))
                    await asyncio.sleep(0.005)
        texts = [text for text, _ in await asyncio.gather(*pending)]
        assert texts == [f"You said: {number}: {QUESTION}" for number in range(24)]
        assert most < 12, "a few wait for a load report on a busy machine, and not all but two"
