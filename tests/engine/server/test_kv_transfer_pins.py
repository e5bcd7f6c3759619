"""Real servers with a transfer port: pages that other engines pin are waited for, and only trusted senders have them
pinned.
"""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from mini_infer_contract.launch import KV_FALLBACK_HEADER, PREFILL_FROM_HEADER
from tests.engine.server.dry_server import DryServer, free_port, wait_until
from tests.support.transfer_sides import PATH, PINNED, USAGE, TransferSide, new_prompt, send_request, text_of

TRUSTING = ("--kv-transfer-trust", "clients")
POOL_TOKENS, MAX_MODEL_LEN = 4096, 2048
SMALL = ("--kv-cache-memory", str(POOL_TOKENS * 16_384), "--max-model-len", str(MAX_MODEL_LEN))


class Side(TransferSide, DryServer):
    def __init__(self, *flags: str) -> None:
        self.transfer_port = free_port()
        super().__init__("--transfer-port", str(self.transfer_port), *flags)

    def complete(self, number: int, **more: Any) -> dict[str, Any]:
        """A prompt of nearly half the pool."""
        return send_request(self, f"{number:05d} " + "x" * 1900, max_tokens=1, **more)

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None


RETAIN = {"kv_transfer_params": {"do_remote_decode": True}}


def test_engine_lives_when_a_trusted_client_retains_prompt_after_prompt() -> None:
    with Side(*TRUSTING, *SMALL, "--kv-transfer-lease", "0.1", "--kv-transfer-retained-share", "1") as side:
        for number in range(18):
            side.complete(number, **RETAIN)
        assert not side.has_ended
        wait_until(side.is_at_rest)
        assert text_of(side.complete(99))


def test_retained_prompts_use_at_most_half_of_the_pool() -> None:
    with Side(*TRUSTING, *SMALL) as side:
        for number in range(6):
            side.complete(number, **RETAIN)
            wait_until(lambda: side.metric(USAGE) <= 0.5)
        wait_until(lambda: side.metric(USAGE) > 0.4 and side.metric(PINNED) > 0)


@contextmanager
def stopped(side: TransferSide) -> Iterator[None]:
    os.kill(side.core_pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(side.core_pid, signal.SIGCONT)


@pytest.mark.timeout(300)
def test_decode_engine_falls_back_and_serves_others_when_its_prefill_peer_hangs() -> None:
    slow = ("--dry-run-step-ms", "200")
    flags = (*TRUSTING, *SMALL, "--kv-transfer-timeout", "1", "--max-num-batched-tokens", "256")
    with (
        Side("--role", "prefill", *flags, *slow) as prefill,
        Side("--role", "decode", *flags) as decode,
        ThreadPoolExecutor() as pool,
    ):
        assert text_of(send_request(decode, new_prompt(), {PREFILL_FROM_HEADER: prefill.address}))  # they have greeted
        wait_until(decode.is_at_rest)
        large = "a large one " + "y" * 2020
        answer = pool.submit(send_request, decode, large, {PREFILL_FROM_HEADER: prefill.address}, max_tokens=2)
        wait_until(lambda: decode.metric(PINNED) > 0 or answer.done())
        with stopped(prefill):
            wait_until(lambda: decode.fallbacks() > 0)
            for number in range(5):
                assert text_of(send_request(decode, new_prompt(20 + number), {PREFILL_FROM_HEADER: prefill.address}))
            assert decode.fallbacks("peer_hangs") > 0
            assert not decode.has_ended
        assert text_of(answer.result(120))
        wait_until(decode.is_at_rest)
        wait_until(prefill.is_at_rest)


@pytest.fixture(scope="module")
def untrusting() -> Iterator[Side]:
    with Side(*SMALL) as side:
        yield side


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_decode": True},
        {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1},
        {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1, "remote_request_id": "x"},
        {"anything": 1},
    ],
)
@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_kv_transfer_params_are_refused_when_the_sender_is_not_trusted(
    untrusting: Side, params: dict[str, Any], path: str
) -> None:
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "kv_transfer_params": params}
    body.pop("messages" if path == PATH else "prompt")
    answer = untrusting.client.post(path, json=body, headers={"x-mini-infer-peer": "0" * 64})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("kv_transfer_params", "kv_transfer_not_trusted")
    assert "--kv-transfer-trust" in error["message"]
    assert untrusting.metric(PINNED) == 0


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nonsense"])
def test_headers_that_name_an_engine_are_ignored_when_the_sender_is_not_trusted(untrusting: Side, address: str) -> None:
    answer = untrusting.client.post(PATH, json={"prompt": "x"}, headers={PREFILL_FROM_HEADER: address})
    assert answer.status_code == 200
    assert KV_FALLBACK_HEADER not in answer.headers


def test_neutral_kv_transfer_params_are_accepted_from_any_client(untrusting: Side) -> None:
    for neutral in (None, {}):
        answer = untrusting.client.post(PATH, json={"prompt": "x", "kv_transfer_params": neutral})
        assert answer.status_code == 200


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True, "remote_host": "h" * 300, "remote_port": 1},
        {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 0},
        {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 99_999},
        {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": True},
        {"do_remote_prefill": True, "remote_host": "a b", "remote_port": "1; x"},
        {"do_remote_prefill": True, "remote_host": "h", "remote_port": 1, "remote_request_id": "x" * 5000},
    ],
)
def test_addresses_that_are_none_are_refused_when_the_sender_is_trusted(trusting: Side, params: dict[str, Any]) -> None:
    answer = trusting.client.post(PATH, json={"prompt": "x", "kv_transfer_params": params})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "kv_transfer_params"


@pytest.fixture(scope="module")
def trusting() -> Iterator[Side]:
    with Side(*TRUSTING, *SMALL, "--kv-transfer-timeout", "0.05", "--kv-transfer-lease", "0.1") as side:
        yield side


HOSTILE = ([], {}, 0, -1, 10**30, 1.5, True, "", "\x00", "x" * 4096, [[]], {"a": {}}, None, "127.0.0.1", "::1", 65535)


def test_engine_lives_when_trusted_kv_transfer_params_have_any_value(trusting: Side) -> None:
    right = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_host": "127.0.0.1",
        "remote_port": free_port(),
    }
    right |= {"remote_request_id": "x", "remote_engine_id": "e", "remote_block_ids": [[1]], "tp_size": 1}
    for name in right:
        for value in HOSTILE:
            body = {"prompt": "x" * 40, "max_tokens": 1, "kv_transfer_params": right | {name: value}}
            assert trusting.client.post(PATH, json=body).status_code in (200, 400)
    assert text_of(trusting.complete(1))
    wait_until(trusting.is_at_rest)
