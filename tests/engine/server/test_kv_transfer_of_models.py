"""Engines with weights that give each other prompts: one process, a group of two ranks, another dtype.

A file of its own, so that no pretended engine waits beside these: one with a transfer port takes 3 % of a core.
"""

import time
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from mini_infer_contract.launch import FETCH_FROM_HEADER, PREFILL_FROM_HEADER
from tests.engine.server.dry_server import EngineServer, free_port, wait_until
from tests.support.tiny_models import DEEPSEEK, save_tiny_model_with_text
from tests.support.transfer_sides import RECEIVED, Counted, new_prompt, proxied, send_request, text_of

TRUSTING = ("--kv-transfer-trust", "clients")
"""The tests play the gateway, without its token."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "transport"),
    [
        ("heads", "nixl"),
        ("heads", "shm"),
        ("latents", "nixl-host"),
        pytest.param("heads", "nixl-host", marks=pytest.mark.features),
        pytest.param("latents", "nixl", marks=pytest.mark.features),
        pytest.param("latents", "shm", marks=pytest.mark.features),
    ],
)
def test_text_is_unchanged_when_kv_is_transferred_for_each_model(model: str, transport: str, tmp_path: Path) -> None:
    """One process and a group of two ranks: heads are dealt out on one way and put together on the other, latents are
    the same on all ranks."""
    architecture, changes = {"heads": ("qwen3", {}), "latents": ("deepseek_v2", DEEPSEEK)}[model]
    save_tiny_model_with_text(tmp_path, architecture, **changes)
    ports = [free_port(), free_port()]
    more_flags = ("--kv-transport", transport, "--kv-cache-memory", "30MB", *TRUSTING)
    flags = [(str(tmp_path), "--device", "cpu", *more_flags, "--transfer-port", str(port)) for port in ports]
    with (
        Counted(*flags[0], "--tensor-parallel-size", "2", limit_s=120) as group,
        Counted(*flags[1], limit_s=120) as alone,
    ):
        wishes: tuple[dict[str, Any], ...] = (
            {},
            {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
            {"logprobs": 3},
            {"structured_outputs": {"regex": "[a-z]{3,40}"}},
        )
        for more in wishes:
            gives_equal_logprobs(alone, ports[0], more)
        gives_equal_logprobs(group, ports[1], {})
        assert text_of(proxied(group, alone, new_prompt(30)))  # what is read is put together as well
        for side, count in ((alone, len(wishes) + 1), (group, 1)):
            wait_until(partial(has_arrived, side, count))
            wait_until(side.is_at_rest)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kv_is_transferred_when_engines_have_two_dtypes() -> None:
    ports = [free_port(), free_port()]
    more_flags = ("--kv-cache-memory", "30MB", *TRUSTING)
    flags = [("demo", "--device", "cpu", *more_flags, "--transfer-port", str(port)) for port in ports]
    with (
        Counted(*flags[0], "--dtype", "bfloat16", limit_s=120) as coarse,
        Counted(*flags[1], "--dtype", "float32", limit_s=120) as exact,
    ):
        for here, there_port in ((exact, ports[0]), (coarse, ports[1])):
            prompt = new_prompt(30)
            own = send_request(here, prompt, cache_salt="own", logprobs=0, max_tokens=4)
            answer = send_request(
                here, prompt, {PREFILL_FROM_HEADER: f"tcp://127.0.0.1:{there_port}"}, logprobs=0, max_tokens=4
            )
            wait_until(partial(counts_a_transfer, here))
            assert here.fallbacks() == 0
            reported, expected = (one["choices"][0]["logprobs"] for one in (answer, own))
            # As far as both go on from the same tokens: two that are about as likely may change places.
            pairs = zip(reported["tokens"], expected["tokens"], strict=True)
            alike = 1 + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            # What bfloat16 loses, and no more.
            assert reported["token_logprobs"][:alike] == pytest.approx(expected["token_logprobs"][:alike], abs=0.3)
            wait_until(here.is_at_rest)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_prefix_is_fetched_when_the_peer_has_it_in_main_memory_alone() -> None:
    ports = [free_port(), free_port()]
    flags = ("demo", "--device", "cpu", "--dtype", "float32", "--max-model-len", "1024", *TRUSTING)
    small = ("--kv-cache-memory", "30MB", "--kv-host-memory", "60MB")
    with (
        Counted(*flags, *small, "--transfer-port", str(ports[0]), limit_s=120) as peer,
        Counted(*flags, "--kv-cache-memory", "60MB", "--transfer-port", str(ports[1]), limit_s=120) as here,
    ):
        prompt = new_prompt(150)
        send_request(peer, prompt, max_tokens=1)
        for _ in range(4):  # evict it from the peer's device
            send_request(peer, new_prompt(250), max_tokens=1)
            wait_until(partial(has_copied_all, peer))
        longer = prompt + " and a question about it"
        own = send_request(here, longer, cache_salt="own")
        answer = send_request(here, longer, {FETCH_FROM_HEADER: f"tcp://127.0.0.1:{ports[0]}"})
        assert text_of(answer) == text_of(own)
        wait_until(lambda: here.arrived + here.fallbacks("computing_is_cheaper") >= 1)
        assert peer.labelled('mini_infer_engine_kv_tier_prefetched_tokens_total{tier="host"}') > 100
        for side in (peer, here):
            wait_until(side.is_at_rest)


def has_copied_all(side: Counted) -> bool:
    """An idle engine copies whole pages to main memory until nothing is left."""
    before = side.labelled('mini_infer_engine_kv_tier_blocks{tier="host"}')
    time.sleep(0.2)
    return before == side.labelled('mini_infer_engine_kv_tier_blocks{tier="host"}') > 0


def has_arrived(side: Counted, count: int) -> bool:
    """The number is in /metrics once a load report has brought it: later than the answer."""
    return side.arrived == count


def counts_a_transfer(side: Counted) -> bool:
    return side.labelled(RECEIVED) + side.fallbacks() >= 1


def gives_equal_logprobs(here: EngineServer, there_port: int, more: dict[str, Any]) -> None:
    """Whether it computes the prompt or another engine does."""
    prompt = new_prompt(30)
    own = send_request(here, prompt, cache_salt="own", **more)
    answer = send_request(here, prompt, {PREFILL_FROM_HEADER: f"tcp://127.0.0.1:{there_port}"}, **more)
    assert text_of(answer) == text_of(own), more
    reported, expected = answer["choices"][0]["logprobs"], own["choices"][0]["logprobs"]
    assert (reported is None) == (expected is None)
    if reported is not None:
        assert reported["tokens"] == expected["tokens"]
        assert reported["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=1e-4)
