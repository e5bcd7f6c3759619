"""Healthy clients beside the attackers: their texts must be those of a quiet fleet, and their waits not much longer."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp

from tests.fuzz.fleet import Fleet
from tests.fuzz.hostile.load import Findings

QUESTIONS = (
    "What does textwrap.dedent do?",
    "What does json.dumps do?",
    "What does os.path.join do?",
    "Explain asyncio.gather.",
    "What is collections.Counter?",
    "How do I use shutil.rmtree?",
    "What does random.shuffle do?",
    "What does re.sub do?",
)
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
MAX_TOKENS = 40
LIMIT_S = 60.0


@dataclass(slots=True)
class Healthy:
    """Asks both models, by streams and whole answers, with and without a schema, and keeps the seconds."""

    fleet: Fleet
    found: Findings
    expected: dict[str, str] = field(default_factory=dict)
    """Answer by request, learned while the fleet is quiet."""
    waits_s: list[float] = field(default_factory=list)

    async def run(self, random: Random, pause_s: float = 0.15) -> None:
        """Sends one request after the other until cancelled."""
        timeout = aiohttp.ClientTimeout(total=LIMIT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                await self._one(session, random)
                await asyncio.sleep(random.uniform(0.5, 1.5) * pause_s)

    async def _one(self, session: aiohttp.ClientSession, random: Random) -> None:
        body: dict[str, Any] = {
            "model": random.choice(self.fleet.models),
            "messages": [{"role": "user", "content": random.choice(QUESTIONS)}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            "stream": random.random() < 0.5,
        }
        if random.random() < 0.25:
            body["messages"] = [{"role": "user", "content": "Bob is 30 years old. Answer in JSON."}]
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}}
        key = json.dumps({name: value for name, value in body.items() if name != "stream"})
        began_s = time.monotonic()
        try:
            async with session.post(self.fleet.gateway_url + "/v1/chat/completions", json=body) as answer:
                text = await (_streamed(answer) if body["stream"] else _whole(answer))
        except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
            self.found.note(f"healthy client: {type(error).__name__}: {error} for {key[:200]}")
            return
        self.waits_s.append(time.monotonic() - began_s)
        expected_text = self.expected.setdefault(key, text)
        self.found.count("healthy", "right" if text == expected_text else "wrong")
        if text != expected_text:
            self.found.note(f"healthy client: {text!r} in place of {expected_text!r} for {key[:200]}")

    def percentile(self, share: float) -> float:
        """Returns the wait in seconds that this share of requests did not exceed."""
        ordered = sorted(self.waits_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


async def _whole(answer: aiohttp.ClientResponse) -> str:
    found = await answer.json()
    if answer.status != 200:
        raise ValueError(f"status {answer.status}: {str(found)[:200]}")
    return str(found["choices"][0]["message"]["content"])


async def _streamed(answer: aiohttp.ClientResponse) -> str:
    if answer.status != 200:
        raise ValueError(f"status {answer.status}: {(await answer.text())[:200]}")
    text, ended = "", False
    async for line in answer.content:
        if line.startswith(b"data: [DONE]"):
            ended = True
        elif line.startswith(b"data: "):
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise ValueError(f"error in the stream: {str(chunk)[:200]}")
            text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    if not ended:
        raise ValueError("the stream has no end")
    return text
