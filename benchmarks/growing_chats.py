"""Hit tokens of growing chats through the gateway, against one engine with the same total cache.

`python benchmarks/growing_chats.py [--at-once N] [--system N]` runs 20 chats over dry-run engines: one engine whose
pages hold 70 % of what the chats need, then two with half of that each behind the gateway, routed by prefix and in
turns. Engines count the hits themselves (`usage.prompt_tokens_details.cached_tokens`).
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

CHATS, TURNS, ANSWER_TOKENS = 20, 8, 16
PAGE_TOKENS = 16
MEGABYTES_A_PAGE = 50 / 190
"""Of the dry-run model: 50 MB hold 190 pages."""
WORDS = ["the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with"]


@asynccontextmanager
async def process(module: str, port: int, *arguments: str) -> AsyncIterator[None]:
    """A server of ours, ready when it is entered and gone when it is left."""
    running = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *arguments,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession() as session:
            for _ in range(300):
                try:
                    async with session.get(f"http://127.0.0.1:{port}/readyz") as response:
                        if response.status == 200:
                            break
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.1)
        yield
    finally:
        running.terminate()
        await running.wait()


def engine(port: int, tokens: int) -> tuple[str, int, tuple[str, ...]]:
    """Arguments of `process` for a dry-run engine whose pages hold `tokens`."""
    memory = f"{round(tokens / PAGE_TOKENS * MEGABYTES_A_PAGE)}MB"
    sockets = ("--events-port", str(port + 100), "--replay-port", str(port + 200))
    return (
        "mini_infer_engine.server.cli",
        port,
        ("--dry-run", "--dry-run-step-ms", "0", "--kv-cache-memory", memory, "--max-model-len", "3000", *sockets),
    )


async def converse(port: int, at_once: int, system_words: int) -> tuple[int, int]:
    """Holds all chats, turns in random order; returns prompt tokens and hit tokens."""
    dice = random.Random(0)

    def text(words: int) -> str:
        return " ".join(dice.choices(WORDS, k=words))

    system = [{"role": "system", "content": text(system_words)}] if system_words else []
    chats = [[*system] for _ in range(CHATS)]
    questions = [[text(dice.randrange(15, 40)) for _ in range(TURNS)] for _ in range(CHATS)]
    order = [chat for chat in range(CHATS) for _ in range(TURNS)]
    dice.shuffle(order)
    prompt_tokens = hit_tokens = 0
    busy = [asyncio.Lock() for _ in range(CHATS)]
    slots = asyncio.Semaphore(at_once)

    async def turn(session: aiohttp.ClientSession, number: int) -> None:
        nonlocal prompt_tokens, hit_tokens
        async with slots, busy[number]:
            chat = chats[number]
            chat.append({"role": "user", "content": questions[number].pop()})
            body = {"model": "dry", "messages": chat, "max_tokens": ANSWER_TOKENS}
            async with session.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as response:
                answer = await response.json()
            assert response.status == 200, answer
            chat.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            prompt_tokens += answer["usage"]["prompt_tokens"]
            hit_tokens += answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(turn(session, number) for number in order))
    return prompt_tokens, hit_tokens


async def main() -> None:
    """Three runs, printed as shares of the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument(
        "--system", type=int, default=0, metavar="WORDS", help="of a system prompt that all chats share"
    )
    parser.add_argument("--port", type=int, default=18400)
    options = parser.parse_args()
    port = options.port
    async with AsyncExitStack() as stack:
        module, _, arguments = engine(port, 200_000)
        await stack.enter_async_context(process(module, port, *arguments))
        needed, most = await converse(port, 1, options.system)
    # What the chats add up to at their ends: each prompt holds the one before it, so what never hit is what they need.
    total = int(0.7 * (needed - most))
    async with AsyncExitStack() as stack:
        module, _, arguments = engine(port + 1, total)
        await stack.enter_async_context(process(module, port + 1, *arguments))
        prompt_tokens, one = await converse(port + 1, options.at_once, options.system)
    print(f"{CHATS} chats need {needed - most} tokens; one engine of {total}: {one} of {prompt_tokens} tokens hit")
    for number, routing in enumerate(("prefix", "round-robin")):
        async with AsyncExitStack() as stack:
            endpoints = []
            for place in range(2):
                module, own, arguments = engine(port + 10 * (number + 1) + place, total // 2)
                await stack.enter_async_context(process(module, own, *arguments))
                address = "tcp://127.0.0.1"
                endpoints.append({"name": f"e{place}", "url": f"http://127.0.0.1:{own}", "model": "dry"})
                endpoints[-1] |= {"events": f"{address}:{own + 100}", "replay": f"{address}:{own + 200}"}
            file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "endpoints.json"
            file.write_text(json.dumps({"endpoints": endpoints}))
            front = port + 10 * (number + 1) + 5
            flags = ("--endpoints", str(file), "--routing", routing)
            await stack.enter_async_context(process("mini_infer_gateway", front, *flags))
            await asyncio.sleep(1)
            _, hits = await converse(front, options.at_once, options.system)
        print(f"two engines of {total // 2}, {routing}: {hits} hit, {hits / one:.1%} of one engine's")


if __name__ == "__main__":
    asyncio.run(main())
