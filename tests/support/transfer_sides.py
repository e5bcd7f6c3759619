"""Engines that give each other prompts, and what is done to them in the middle of a transfer."""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import httpx

from mini_infer_contract.launch import PREFILL_FROM_HEADER
from tests.engine.server.dry_server import EngineServer, wait_until
from tests.support.cut_link import CutLink

PATH = "/v1/completions"
PINNED = "mini_infer_engine_kv_transfer_pinned_pages"
LEASES = "mini_infer_engine_kv_transfer_open_leases"
RECEIVED = 'mini_infer_engine_kv_transfers_total{direction="received"}'
USAGE = "mini_infer_engine_kv_usage_ratio"
_numbers = iter(range(10**6))


def new_prompt(num_words: int = 60) -> str:
    """One that no engine has in its cache, not even its beginning."""
    number = next(_numbers)
    return f"{number:06d} is what this prompt is about. " + " ".join(f"word{number + n}" for n in range(num_words))


class Counted(EngineServer):
    """What an engine tells of its transfers."""

    def labelled(self, series: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(series))

    def fallbacks(self, reason: str = "") -> float:
        label = f'{{reason="{reason}"}}' if reason else ""
        return self.labelled(f"mini_infer_engine_kv_transfer_fallbacks_total{label}")

    @property
    def arrived(self) -> float:
        """Prompts that came from elsewhere, or were on their way for too long, as happens on a machine that is busy."""
        return self.labelled(RECEIVED) + self.fallbacks("late")

    def is_at_rest(self) -> bool:
        return self.metric(PINNED) == 0 and self.metric(LEASES) == 0 and self.metric(USAGE) == 0


class TransferSide(Counted):
    """One of which the tests know the transfer port, and which they may kill."""

    transfer_port: int

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.transfer_port}"

    def kill(self) -> None:
        os.kill(self.core_pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


async def send_all(decode: Counted, prompts: list[str], address: str = "") -> list[str]:
    """What is said to each, computed at `address` or by itself; empty where the decode engine has died."""
    async with httpx.AsyncClient(base_url=decode.url, timeout=60) as client:

        async def one(prompt: str) -> str:
            body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "cache_salt": address or "own"}
            try:
                answer = await client.post(PATH, json=body, headers={PREFILL_FROM_HEADER: address} if address else {})
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                return ""
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        return list(await asyncio.gather(*map(one, prompts)))


def send_request(side: EngineServer, prompt: str, headers: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0} | more
    answer = side.client.post(PATH, json=body, headers=headers or {})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def text_of(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def proxied(prefill: EngineServer, decode: EngineServer, prompt: str, **more: Any) -> dict[str, Any]:
    """What a public proxy of vLLM's kind does: prefill first, then decode with what that answered."""
    empty = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
    wish = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(empty)
    first = send_request(prefill, prompt, **more | {"max_tokens": 1, "kv_transfer_params": wish})
    params = first["kv_transfer_params"]
    assert params["do_remote_prefill"]
    assert params["remote_block_ids"][0]
    return send_request(decode, prompt, **more, kv_transfer_params=params)


class Pair:
    """A prefill engine and a decode engine, and between them a link: what they say goes through it, pages do not."""

    HOWS = ("kill prefill", "kill decode", "stop prefill", "stop decode", "hold up the link", "cut the link")

    def __init__(self, draw: random.Random, make: Callable[[str, int | None], TransferSide], within_s: float) -> None:
        """`make`: a side by its role, and by its transfer port where it had one before.

        `within_s`: after a request, the latest moment at which something is done.
        """
        self.draw, self._make, self._within_s = draw, make, within_s
        self.prefill, self.decode = make("prefill", None), make("decode", None)
        self.link = CutLink(self.prefill.transfer_port)

    async def disturbed(self, how: str, prompts: list[str]) -> list[str]:
        """What is said to requests that begin before one side is killed, or stopped or cut off for a while."""
        sending = asyncio.create_task(send_all(self.decode, prompts, f"tcp://127.0.0.1:{self.link.port}"))
        await asyncio.sleep(self.draw.uniform(0, self._within_s))
        match how:
            case "kill prefill":
                self.prefill.kill()
            case "kill decode":
                self.decode.kill()
            case "stop prefill":
                return await self._stopped(self.prefill, sending, for_s=None)
            case "stop decode":
                return await self._stopped(self.decode, sending, for_s=self.draw.uniform(0.1, 2.0))
            case "cut the link":
                self.link.cut()
            case "hold up the link":
                self.link.pause()
        return await sending

    async def _stopped(self, side: TransferSide, sending: "asyncio.Task[list[str]]", for_s: float | None) -> list[str]:
        """`for_s` None: until all is answered."""
        os.kill(side.core_pid, signal.SIGSTOP)
        try:
            if for_s is None:
                return await sending
            await asyncio.sleep(for_s)
        finally:
            os.kill(side.core_pid, signal.SIGCONT)
        return await sending

    def mend(self) -> None:
        """Both are there and reach each other again."""
        self.link.heal()
        if self.prefill.process.poll() is not None:
            self.prefill.__exit__(None, None, None)
            self.prefill = self._make("prefill", self.prefill.transfer_port)
        if self.decode.process.poll() is not None:
            self.decode.__exit__(None, None, None)
            self.decode = self._make("decode", None)

    def close(self) -> None:
        self.link.__exit__(None, None, None)
        self.prefill.__exit__(None, None, None)
        self.decode.__exit__(None, None, None)


def disturb(pair: Pair, rounds: int, words: tuple[int, ...] = (80, 200), hows: tuple[str, ...] = Pair.HOWS) -> None:
    """At random moments of transfers of prompts with so many words, each way in turn; the pair is closed then."""
    with contextlib.closing(pair):
        for number in range(rounds):
            how = hows[number % len(hows)]
            prompts = [new_prompt(pair.draw.choice(words)) for _ in range(3)]
            own = asyncio.run(send_all(pair.decode, prompts))
            texts = asyncio.run(pair.disturbed(how, prompts))
            if how == "kill decode":  # its clients are told that it is gone, and what it has said before that is right
                assert all(text in ("", right) for text, right in zip(texts, own, strict=True)), how
            else:
                assert texts == own, how
            pair.mend()
            wait_until(pair.decode.is_at_rest)
            wait_until(pair.prefill.is_at_rest)
