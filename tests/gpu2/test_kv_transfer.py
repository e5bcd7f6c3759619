"""Keys and values between engines on two GPUs of one host: the same text, and nothing lost where one dies.

KV_TEST_GPUS=0,0 puts both sides on one GPU, where there is no other; what needs two is left out then.
TRANSFER_DISTURBANCES=50 does so much to each of four pairs at random moments: with `-n 4` at the same time.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from mini_infer_contract.launch import FETCH_FROM_HEADER, PREFILL_FROM_HEADER
from tests.engine.server.dry_server import free_port, wait_until
from tests.support.transfer_sides import PATH, RECEIVED, Pair, TransferSide, disturb

torch = pytest.importorskip("torch")
pytest.importorskip("nixl_cu13", reason="without NIXL nothing moves: pip install nixl-cu13")
GPUS = os.environ.get("KV_TEST_GPUS", "0,1").split(",")
"""Of the prefill side and of the decode side."""
pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.skipif(
        torch.cuda.device_count() < len(set(GPUS)), reason="needs two GPUs of one host: see KV_TEST_GPUS"
    ),
]

FLAGS = (
    "demo",
    "--dtype",
    "float32",
    "--kv-cache-memory",
    "2GB",
    "--max-num-seqs",
    "16",
    "--long-prefill-token-threshold",
    "512",
)
START_S = 150.0
dice = random.Random(0)


class GpuSide(TransferSide):
    """An engine on a GPU of its own, or on several."""

    def __init__(self, role: str, gpus: str, *more: str, port: int | None = None) -> None:
        self.transfer_port = free_port() if port is None else port
        transfer = ("--transfer-port", str(self.transfer_port), "--kv-transfer-trust", "clients")
        flags = (*FLAGS, "--role", role, *transfer, *more)
        super().__init__(*flags, variables={"CUDA_VISIBLE_DEVICES": gpus}, limit_s=START_S)

    @property
    def received(self) -> float:
        return self.labelled(RECEIVED)

    def wait_for_received(self, count: float) -> None:
        """Until /metrics has this count, which comes with a load report: later than the answer."""
        try:
            wait_until(lambda: self.received >= count)
        except AssertionError:
            pytest.fail(f"{self.received} transfers were received, not {count}: {self.text_of_log[-2000:]}")
        assert self.received == count


@contextmanager
def started(kinds: dict[str, tuple[str, ...]]) -> Iterator[dict[str, GpuSide]]:
    """By name; each compiles its kernels: together they take half the time."""
    with ThreadPoolExecutor() as threads:
        begun = {name: threads.submit(GpuSide, *arguments) for name, arguments in kinds.items()}
    made = {name: future.result() for name, future in begun.items() if future.exception() is None}
    try:
        for future in begun.values():
            future.result()
        yield made
    finally:
        for side in made.values():
            side.__exit__(None, None, None)


@pytest.fixture(scope="module", params=["nixl", "cuda-ipc"])
def sides(request: pytest.FixtureRequest) -> Iterator[dict[str, GpuSide]]:
    how = ("--kv-transport", request.param)
    with started({"prefill": ("prefill", GPUS[0], *how), "decode": ("decode", GPUS[1], *how)}) as made:
        yield made


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[str, GpuSide]]:
    """Each GPU has a rank of both groups, and one the engine that is alone, too."""
    two = ("0,1", "--tensor-parallel-size", "2")
    with started({"prefill": ("prefill", *two), "decode": ("decode", *two), "alone": ("prefill", "1")}) as made:
        yield made


@pytest.fixture(scope="module")
def unlike() -> Iterator[dict[str, GpuSide]]:
    """A pair whose keys and values go through pinned memory, and one of two dtypes."""
    host = ("--kv-transport", "nixl-host")
    kinds: dict[str, tuple[str, ...]] = {
        "prefill": ("prefill", GPUS[0], *host),
        "decode": ("decode", GPUS[1], *host),
        "coarse prefill": ("prefill", GPUS[0], "--dtype", "bfloat16"),
        "exact decode": ("decode", GPUS[1]),
    }
    with started(kinds) as made:
        yield made


def prompt(num_tokens: int) -> list[int]:
    return [dice.randrange(300, 2000) for _ in range(num_tokens)]


def send_prompt(side: GpuSide, token_ids: list[int], headers: dict[str, str] | None = None, **more: Any) -> str:
    body = {"prompt": token_ids, "max_tokens": 32, "temperature": 0, "ignore_eos": True} | more
    answer = side.client.post(PATH, json=body, headers=headers or {}, timeout=120)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.parametrize("num_tokens", [40, 128, 700, 3000])
@pytest.mark.parametrize("more", [{}, {"temperature": 0.9, "seed": 11}], ids=["greedy", "seeded"])
def test_transferred_text_equals_one_engines(sides: dict[str, GpuSide], num_tokens: int, more: dict[str, Any]) -> None:
    prefill, decode = sides["prefill"], sides["decode"]
    token_ids, before = prompt(num_tokens), decode.received
    own = send_prompt(decode, token_ids, cache_salt="own", **more)
    assert send_prompt(decode, token_ids, {PREFILL_FROM_HEADER: prefill.address}, **more) == own
    wait_until(prefill.is_at_rest)
    wait_until(decode.is_at_rest)
    decode.wait_for_received(before + (num_tokens > 128))  # less than a page is computed where it is


def test_kept_and_fetched_prompts_give_the_same_text(sides: dict[str, GpuSide]) -> None:
    prefill, decode = sides["prefill"], sides["decode"]
    token_ids, before = prompt(1500), decode.received
    own = send_prompt(decode, token_ids, cache_salt="own")
    wish = {"do_remote_decode": True}
    body = {"prompt": token_ids, "max_tokens": 1, "temperature": 0, "kv_transfer_params": wish}
    params = prefill.client.post(PATH, json=body).json()["kv_transfer_params"]
    assert send_prompt(decode, token_ids, kv_transfer_params=params, cache_salt="") == own
    decode.wait_for_received(before + 1)
    other = prompt(1500)
    send_prompt(prefill, other)
    assert send_prompt(decode, [*other, 301, 302], {FETCH_FROM_HEADER: prefill.address}) == send_prompt(
        decode, [*other, 301, 302], cache_salt="own"
    )
    decode.wait_for_received(before + 2)
    wait_until(prefill.is_at_rest)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="groups have a rank on each of two GPUs")
@pytest.mark.parametrize("producer", ["prefill", "alone"])
@pytest.mark.parametrize("num_tokens", [300, 700])
def test_a_group_takes_what_a_group_or_one_engine_gives(
    groups: dict[str, GpuSide], producer: str, num_tokens: int
) -> None:
    prefill, decode = groups[producer], groups["decode"]
    token_ids, received, fallbacks = prompt(num_tokens), decode.received, decode.fallbacks()
    own = send_prompt(decode, token_ids, cache_salt="own")
    assert send_prompt(decode, token_ids, {PREFILL_FROM_HEADER: prefill.address}) == own
    wait_until(prefill.is_at_rest)
    wait_until(decode.is_at_rest)
    decode.wait_for_received(received + 1)
    assert decode.fallbacks() == fallbacks, decode.text_of_log[-2000:]


@pytest.mark.parametrize("num_tokens", [300, 3000])
def test_text_is_the_same_through_pinned_memory(unlike: dict[str, GpuSide], num_tokens: int) -> None:
    prefill, decode = unlike["prefill"], unlike["decode"]
    token_ids, received, fallbacks = prompt(num_tokens), decode.received, decode.fallbacks()
    own = send_prompt(decode, token_ids, cache_salt="own")
    assert send_prompt(decode, token_ids, {PREFILL_FROM_HEADER: prefill.address}) == own
    decode.wait_for_received(received + 1)
    assert decode.fallbacks() == fallbacks, decode.text_of_log[-2000:]
    cached = prompt(num_tokens)
    send_prompt(prefill, cached)  # it is fetched, or computed where that is cheaper
    assert send_prompt(decode, cached, {FETCH_FROM_HEADER: prefill.address}) == send_prompt(
        decode, cached, cache_salt="own"
    )
    wait_until(prefill.is_at_rest)
    wait_until(decode.is_at_rest)


def test_pages_of_another_dtype_are_converted(unlike: dict[str, GpuSide]) -> None:
    """What CUDA IPC does not convert goes by NIXL, where nobody has chosen."""
    prefill, decode = unlike["coarse prefill"], unlike["exact decode"]
    assert decode.client.get("/readyz").json()["kv_transport"] == "cuda-ipc+nixl"
    received, fallbacks = decode.received, decode.fallbacks()
    assert send_prompt(decode, prompt(1500), {PREFILL_FROM_HEADER: prefill.address})
    wait_until(prefill.is_at_rest)
    decode.wait_for_received(received + 1)
    assert decode.fallbacks() == fallbacks, decode.text_of_log[-2000:]


async def _send_all(decode: GpuSide, prompts: list[list[int]], address: str) -> list[str]:
    async with httpx.AsyncClient(base_url=decode.url, timeout=120) as client:

        async def one(token_ids: list[int]) -> str:
            body = {"prompt": token_ids, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
            answer = await client.post(PATH, json=body, headers={PREFILL_FROM_HEADER: address})
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        return list(await asyncio.gather(*map(one, prompts)))


@pytest.mark.parametrize("pause_s", [0.0, 0.01, 0.05, 0.2])
def test_a_prefill_engine_that_stops_costs_time_and_nothing_else(sides: dict[str, GpuSide], pause_s: float) -> None:
    prefill, decode = sides["prefill"], sides["decode"]
    prompts = [prompt(2500) for _ in range(4)]

    async def stopped() -> list[str]:
        sending = asyncio.create_task(_send_all(decode, prompts, prefill.address))
        await asyncio.sleep(pause_s)
        os.kill(prefill.core_pid, signal.SIGSTOP)
        try:
            return await sending
        finally:
            os.kill(prefill.core_pid, signal.SIGCONT)

    texts = asyncio.run(stopped())
    assert [bool(text) for text in texts] == [True] * 4
    wait_until(prefill.is_at_rest, 30)
    wait_until(decode.is_at_rest, 30)


def test_last_prompts_are_computed_locally_when_the_prefill_engine_dies(sides: dict[str, GpuSide]) -> None:
    prefill, decode = sides["prefill"], sides["decode"]
    prompts, before = [prompt(2500) for _ in range(4)], decode.fallbacks()

    async def killed() -> list[str]:
        sending = asyncio.create_task(_send_all(decode, prompts, prefill.address))
        await asyncio.sleep(0.02)
        os.kill(prefill.core_pid, signal.SIGKILL)
        return await sending

    assert len(asyncio.run(killed())) == 4
    assert send_prompt(decode, prompt(600), {PREFILL_FROM_HEADER: prefill.address})
    assert decode.fallbacks() > before
    wait_until(decode.is_at_rest, 30)


@pytest.mark.timeout(0)
@pytest.mark.skipif("TRANSFER_DISTURBANCES" not in os.environ, reason="takes minutes: TRANSFER_DISTURBANCES=50")
@pytest.mark.parametrize("pair", [1, 2])
@pytest.mark.parametrize("transport", ["nixl", "nixl-host", "cuda-ipc"])
def test_many_times_at_random_moments(transport: str, pair: int) -> None:
    """Most often sides are stopped or cut off: one that is killed takes ten seconds to start again."""
    hows = (*Pair.HOWS, *(Pair.HOWS[2:] * 3))

    def make(role: str, port: int | None) -> GpuSide:
        gpu = GPUS[0] if role == "prefill" else GPUS[1]
        return GpuSide(role, gpu, "--kv-transfer-lease", "1", "--kv-transport", transport, port=port)

    between = Pair(random.Random(time.time_ns() + pair), make, within_s=0.05)
    disturb(between, int(os.environ["TRANSFER_DISTURBANCES"]), words=(150, 450), hows=hows)
