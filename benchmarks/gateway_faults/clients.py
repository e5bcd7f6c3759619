"""Clients in a closed loop, half of them streaming, each answer compared with what an undisturbed engine says."""

import asyncio
import itertools
import json
import time
from collections import Counter
from dataclasses import dataclass, field

import aiohttp

from benchmarks.gateway_faults.world import MODEL, Server

WORDS = "what is lost when an engine dies in the middle of an answer and who tells é 😀"
TIMEOUT_S = 60.0


@dataclass
class Result:
    """What the clients saw."""

    sent: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    answered_by: list[tuple[float, str]] = field(default_factory=list)
    """(when, which engine)"""


class Clients:
    """Keeps `count` requests in flight towards the gateways that are listed at the time."""

    def __init__(self, gateways: list[Server], count: int) -> None:
        self.gateways, self._count = gateways, count
        self.result = Result()
        self._numbers = itertools.count()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Clients":
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        self._tasks = [asyncio.create_task(self._loop(number)) for number in range(self._count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)
        await self._session.close()

    async def used_again(self, engine: str) -> float:
        """Seconds from now until this engine has answered a request that it began after now."""
        began = time.monotonic()
        while not any(when > began and name == engine for when, name in reversed(self.result.answered_by[-500:])):
            if time.monotonic() - began > TIMEOUT_S:
                return float("inf")
            await asyncio.sleep(0.02)
        return time.monotonic() - began

    async def _loop(self, client: int) -> None:
        while not self._stopping:
            number = next(self._numbers)
            gateway = self.gateways[number % len(self.gateways)]
            began = time.monotonic()
            self.result.sent += 1
            try:
                problem = await self._request(gateway, f"{number} {WORDS}", streams=client % 2 == 0)
            except aiohttp.ClientConnectorError:
                problem = "connection refused"
            except aiohttp.ClientError as error:
                problem = f"connection broke ({type(error).__name__})"
            except TimeoutError:
                problem = f"nothing for {TIMEOUT_S:g} s"
            self.result.seconds.append(time.monotonic() - began)
            if problem:
                self.result.failed[problem] += 1
                await asyncio.sleep(0.01)

    async def _request(self, gateway: Server, text: str, streams: bool) -> str | None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "stream": streams, "temperature": 1.0}
        async with self._session.post(gateway.url + "/v1/chat/completions", json=body) as response:
            answer = await response.text()
            if response.status != 200:
                return f"status {response.status}"
            reply = _streamed(answer) if streams else json.loads(answer)["choices"][0]["message"]["content"]
            self.result.answered_by.append((time.monotonic(), response.headers.get("x-mini-infer-pod", "")))
        if reply is None:
            return "error event in the stream"
        return None if reply == f"You said: {text}" else "another text"


def _streamed(answer: str) -> str | None:
    """The text of a whole stream; None: it did not end well."""
    if not answer.endswith("data: [DONE]\n\n"):
        return None
    events = [json.loads(event.removeprefix("data: ")) for event in answer.split("\n\n")[:-2]]
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])
