"""The openai package against any OpenAI-compatible server: one answer, one streamed, many at once.

    python examples/openai_client.py                                # the platform of `make up`
    python examples/openai_client.py --url http://127.0.0.1:8000    # a bare engine: mini-infer-serve --model demo

It prints the time to the first token (TTFT), tokens per second, and how much of each prompt was cached.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from openai import APIConnectionError, APIError, AsyncOpenAI
from openai.types import CompletionUsage

NAMES = ("textwrap.dedent", "os.path.join", "itertools.chain", "json.dumps", "math.gcd", "shutil.copy")


@dataclass(frozen=True, slots=True)
class Timed:
    """A streamed answer and when it came."""

    first_token_s: float
    whole_s: float
    usage: CompletionUsage


async def chat(client: AsyncOpenAI, model: str, question: str, max_tokens: int) -> None:
    """One question, the answer in one piece."""
    answer = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], max_tokens=max_tokens, temperature=0
    )
    print(answer.choices[0].message.content)


async def stream(client: AsyncOpenAI, model: str, question: str, max_tokens: int, *, show: bool) -> Timed:
    """One question, the answer piece by piece; `show` prints the pieces as they come."""
    started = time.perf_counter()
    pieces = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},  # the last piece tells the tokens
    )
    first_token_s, usage = 0.0, None
    async for piece in pieces:
        usage = piece.usage or usage
        if piece.choices and (text := piece.choices[0].delta.content):
            first_token_s = first_token_s or time.perf_counter() - started
            if show:
                print(text, end="", flush=True)
    if usage is None:
        raise SystemExit("the server sent no usage, so there are no tokens to count")
    return Timed(first_token_s, time.perf_counter() - started, usage)


async def many(client: AsyncOpenAI, model: str, count: int, max_tokens: int) -> None:
    """`count` questions at the same time, and what that comes to."""
    questions = [f"What does {NAMES[index % len(NAMES)]} do?" for index in range(count)]
    started = time.perf_counter()
    answers = await asyncio.gather(*(stream(client, model, text, max_tokens, show=False) for text in questions))
    seconds = time.perf_counter() - started
    tokens = sum(answer.usage.completion_tokens for answer in answers)
    ttft_ms = 1000 * statistics.median(answer.first_token_s for answer in answers)
    cached = sum(_cached_tokens(answer.usage) for answer in answers)
    prompt = sum(answer.usage.prompt_tokens for answer in answers)
    print(f"{count} answers, {tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s")
    print(f"median TTFT {ttft_ms:.0f} ms, {cached} of {prompt} prompt tokens were cached")


def _cached_tokens(usage: CompletionUsage) -> int:
    return (usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0


async def _first_model(client: AsyncOpenAI) -> str:
    listed = (await client.models.list()).data
    if not listed:
        raise SystemExit("the server lists no model yet: try again shortly, or name one with --model")
    return listed[0].id


async def run(options: argparse.Namespace) -> None:
    """The three parts, one after the other."""
    base = options.url.rstrip("/").removesuffix("/v1")
    key = os.environ.get("OPENAI_API_KEY", "none")
    async with AsyncOpenAI(base_url=f"{base}/v1", api_key=key, timeout=options.timeout) as client:
        model = options.model or await _first_model(client)
        print(f"--- chat with {model}: {options.question}")
        await chat(client, model, options.question, options.max_tokens)
        print("\n--- the same, streamed")
        answer = await stream(client, model, options.question, options.max_tokens, show=True)
        speed = answer.usage.completion_tokens / answer.whole_s
        print(f"\nTTFT {1000 * answer.first_token_s:.0f} ms, {speed:.0f} tokens/s, ", end="")
        print(f"{_cached_tokens(answer.usage)} of {answer.usage.prompt_tokens} prompt tokens were cached")
        print(f"\n--- {options.count} at once")
        await many(client, model, options.count, options.max_tokens)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="(default: the gateway of make up)")
    parser.add_argument("--model", help="(default: the first that the server lists)")
    parser.add_argument("--question", default="What does textwrap.dedent do?")
    parser.add_argument("--count", type=int, default=16, help="questions at once (default: 16)")
    parser.add_argument("--max-tokens", type=int, default=100, help="of one answer (default: 100)")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="(default: 120)")
    options = parser.parse_args(arguments)
    if options.count < 1:
        parser.error(f"--count is {options.count}: ask at least once")
    try:
        asyncio.run(run(options))
    except APIConnectionError as error:
        print(f"{options.url} cannot be reached ({error.__cause__ or error}): is `make up` running?", file=sys.stderr)
        return 1
    except APIError as error:
        print(f"{options.url} refused: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
