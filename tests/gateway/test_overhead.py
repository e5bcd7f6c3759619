"""What a request costs the gateway, as ratios of CPU time within one run, so that a slower machine changes nothing.

The yardstick is the same gateway in front of an endpoint that serves no tokenizer: it relays and does nothing else.
`benchmarks/gateway_overhead.py` has the figures beside other routers.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from benchmarks.gateway_load import client, routers
from benchmarks.gateway_load.client import Target
from mini_infer_prompts.prompt import PromptAssets
from tests.prompts.templates import CHATML
from tests.support.fake_engine import byte_assets

ENDPOINT = Path(client.__file__).with_name("endpoint.py")
SMALL, TURNS = 300, 20

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads CPU time from /proc")


@dataclass(frozen=True)
class Relay:
    """A gateway process with one endpoint behind it."""

    running: routers.Running

    async def cost_ms(self, bodies: list[bytes], connections: int) -> float:
        """CPU a request."""
        before_s = self.running.cpu_s()
        answers = await client.closed_loop(Target(self.running.port), bodies, connections)
        assert {answer.status for answer in answers} == {200}
        return 1e3 * (self.running.cpu_s() - before_s) / len(bodies)


def assets(folder: Path) -> Path:
    """A tokenizer of bytes with ChatML's tokens and template."""
    tokenizer = Tokenizer.from_str(byte_assets().files["tokenizer.json"])
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    files = {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": "{}", "chat_template.jinja": CHATML}
    file = folder / "assets.json"
    file.write_bytes(msgspec.json.encode(PromptAssets.from_files(files)))
    return file


@contextlib.asynccontextmanager
async def relay(folder: Path, file: Path | None) -> AsyncIterator[Relay]:
    async with contextlib.AsyncExitStack() as stack:
        port = routers.free_port()
        command = [sys.executable, str(ENDPOINT), str(port), "m", *([str(file)] if file else [])]
        await stack.enter_async_context(routers.running("endpoint", command, port, folder / "endpoint.log", b""))
        own = routers.free_port()
        command = routers.our_command(own, [f"http://127.0.0.1:{port}"], folder)
        ready = client.chat([("user", "hi")])
        running = await stack.enter_async_context(routers.running("ours", command, own, folder / "ours.log", ready))
        async with asyncio.timeout(120):
            while file and b"approximate" not in await index_kind(own):  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.05)
        yield Relay(running)


async def index_kind(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /debug/endpoints HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer


def small(first: int) -> list[bytes]:
    return [client.chat([("user", f"question {first + number}: what is it, and why?")]) for number in range(SMALL)]


def turns(words: int) -> list[bytes]:
    """A long chat, with another last message each time."""
    chat = client.alternating(iter(f"message {number}: " + "and so on " * (words // 60) for number in range(20)))
    return [client.chat([*chat, ("user", f"question {number}")]) for number in range(TURNS + 1)]


async def test_tokenisation_costs_a_bounded_multiple_of_relaying(tmp_path: Path) -> None:
    async with relay(tmp_path, None) as plain, relay(tmp_path, assets(tmp_path)) as exact:
        await plain.cost_ms(small(0), 8)
        await exact.cost_ms(small(0), 8)
        await exact.cost_ms(turns(100_000)[:1], 1)
        costs: dict[str, list[float]] = {"relay": [], "small": [], "long, relay": [], "long": []}
        for number in range(3):
            costs["relay"].append(await plain.cost_ms(small(SMALL * number), 8))
            costs["small"].append(await exact.cost_ms(small(SMALL * number + 50_000), 8))
            costs["long, relay"].append(await plain.cost_ms(turns(100_000)[1:], 1))
            costs["long"].append(await exact.cost_ms(turns(100_000)[1:], 1))
    least = {name: min(values) for name, values in costs.items()}
    reported = json.dumps(least)
    assert least["small"] < 2.5 * least["relay"], reported
    assert least["long"] < least["long, relay"] + 8 * least["relay"], f"only the last message is new: {reported}"
