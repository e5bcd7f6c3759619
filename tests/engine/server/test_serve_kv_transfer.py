"""Two engines that exchange keys and values: real processes, real transports, a pretended model.

A page of the pretended model holds the token ids that were computed into it, and its reply is read from there alone: a
page that is missing, wrong or overwritten changes the text.
"""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from mini_infer_contract.launch import FETCH_FROM_HEADER, KV_FALLBACK_HEADER, PREFILL_FROM_HEADER
from tests.engine.server.dry_server import DryServer, free_port, wait_until
from tests.support.transfer_sides import (
    PATH,
    RECEIVED,
    Pair,
    TransferSide,
    disturb,
    new_prompt,
    proxied,
    send_all,
    send_request,
    text_of,
)


class Side(TransferSide, DryServer):
    """An engine with a transfer port and a pretended model."""

    def __init__(self, role: str, *flags: str, port: int | None = None) -> None:
        self.transfer_port = free_port() if port is None else port
        self.flags = (role, *flags)
        transfer = ("--transfer-port", str(self.transfer_port), "--kv-transfer-trust", "clients")
        super().__init__("--role", role, *transfer, *flags)


@pytest.fixture(scope="module")
def prefill() -> Iterator[Side]:
    with Side("prefill") as side:
        yield side


@pytest.fixture(scope="module")
def decode() -> Iterator[Side]:
    with Side("decode", "--kv-transfer-lease", "2") as side:
        yield side


def test_readyz_reports_role_and_transport(prefill: Side, decode: Side) -> None:
    answers = [side.client.get("/readyz").json() for side in (prefill, decode)]
    assert [one["role"] for one in answers] == ["prefill", "decode"]
    assert {one["kv_transport"] for one in answers} == {"nixl"}


@pytest.mark.parametrize(
    "more",
    [{}, {"temperature": 1.0, "seed": 7}, {"stop": ["word"]}, {"n": 2, "temperature": 1, "seed": 3}, {"max_tokens": 1}],
)
def test_text_is_unchanged_when_a_prompt_is_prefilled_elsewhere(
    prefill: Side, decode: Side, more: dict[str, Any]
) -> None:
    prompt, before = new_prompt(), decode.arrived
    own = send_request(decode, prompt, cache_salt="own", **more)
    answer = send_request(decode, prompt, {PREFILL_FROM_HEADER: prefill.address}, **more)
    assert text_of(answer) == text_of(own)
    assert answer["usage"]["completion_tokens"] == own["usage"]["completion_tokens"]
    wait_until(lambda: decode.arrived >= before + 1)  # of n copies only the first receives, unless it is late
    wait_until(prefill.is_at_rest)
    wait_until(decode.is_at_rest)


@pytest.mark.parametrize("stream", [False, True])
def test_a_fallback_header_is_sent_when_no_kv_cache_was_received(decode: Side, stream: bool) -> None:
    body = {"prompt": new_prompt(), "max_tokens": 4, "stream": stream}
    for address, reasons in ((f"tcp://127.0.0.1:{free_port()}", ("unreachable", "late")), (None, (None,))):
        headers = {PREFILL_FROM_HEADER: address} if address else {}
        answer = decode.client.post(PATH, json=body, headers=headers)
        assert answer.status_code == 200
        assert answer.headers.get(KV_FALLBACK_HEADER) in reasons
        assert "finish_reason" in answer.text


def settled_bytes(side: Side) -> float:
    """What it has given, once no more of it is told: counters come a moment after answers."""
    read = 'mini_infer_engine_kv_transfer_bytes_total{direction="given"}'
    last = -1.0
    while (now := side.labelled(read)) != last:
        last = now
        time.sleep(0.5)
    return now


def test_both_engines_hit_their_prefix_cache_when_a_prompt_is_repeated(prefill: Side, decode: Side) -> None:
    prompt, longer = new_prompt(), " and more of it" * 8
    send_request(decode, prompt, {PREFILL_FROM_HEADER: prefill.address})
    sent_bytes = settled_bytes(prefill)
    again = send_request(decode, prompt + longer, {PREFILL_FROM_HEADER: prefill.address})
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(prompt) - 32
    assert text_of(again) == text_of(send_request(decode, prompt + longer, cache_salt="own"))
    assert settled_bytes(prefill) - sent_bytes < 4 * (len(prompt) // 2)  # the missing pages, not the whole prompt
    hit = send_request(decode, prompt)
    assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(prompt) - 32


def test_vllms_proxy_protocol_transfers_kv(prefill: Side, decode: Side) -> None:
    prompt = new_prompt()
    own, before = send_request(decode, prompt, cache_salt="own"), decode.arrived
    assert text_of(proxied(prefill, decode, prompt)) == text_of(own)
    wait_until(lambda: decode.arrived == before + 1)
    wait_until(prefill.is_at_rest)
    wait_until(decode.is_at_rest)


def test_retained_kv_is_sent_once_and_only_for_its_own_prompt(prefill: Side, decode: Side) -> None:
    wish = {"do_remote_decode": True}
    kept = new_prompt()
    params = send_request(prefill, kept, max_tokens=1, kv_transfer_params=wish)["kv_transfer_params"]
    other, before = new_prompt(), decode.fallbacks("other_prompt")
    own = send_request(decode, other, cache_salt="own")
    assert text_of(send_request(decode, other, kv_transfer_params=params)) == text_of(own)
    wait_until(lambda: decode.fallbacks("other_prompt") == before + 1)
    received, lost = decode.arrived, decode.fallbacks("not_held")
    send_request(decode, kept, kv_transfer_params=params, cache_salt="first")
    wait_until(lambda: decode.arrived == received + 1)
    send_request(decode, kept, kv_transfer_params=params, cache_salt="second")
    wait_until(lambda: decode.fallbacks("not_held") == lost + 1)
    wait_until(prefill.is_at_rest)


def test_a_prefix_is_fetched_from_a_peer_when_it_has_it_cached(prefill: Side, decode: Side) -> None:
    prompt, before = new_prompt(), decode.arrived
    send_request(prefill, prompt)
    longer = prompt + " and a question about it"
    own = send_request(decode, longer, cache_salt="own")
    answer = send_request(decode, longer, {FETCH_FROM_HEADER: prefill.address})
    assert text_of(answer) == text_of(own)
    wait_until(lambda: decode.arrived + decode.fallbacks("computing_is_cheaper") >= before + 1)
    assert text_of(send_request(decode, new_prompt(), {FETCH_FROM_HEADER: prefill.address}))  # it has none of this one
    wait_until(lambda: decode.fallbacks("not_held") >= 1)
    wait_until(prefill.is_at_rest)


def test_the_prompt_is_computed_locally_when_the_peer_is_unreachable(decode: Side) -> None:
    before = decode.fallbacks()
    prompt = new_prompt()
    answer = send_request(decode, prompt, {PREFILL_FROM_HEADER: f"tcp://127.0.0.1:{free_port()}"})
    assert text_of(answer) == text_of(send_request(decode, prompt, cache_salt="own"))
    wait_until(lambda: decode.fallbacks() == before + 1)
    wait_until(decode.is_at_rest)


def test_a_request_gets_400_when_the_peers_address_is_invalid(decode: Side) -> None:
    answer = decode.client.post(PATH, json={"prompt": "x"}, headers={PREFILL_FROM_HEADER: "http://there"})
    assert answer.status_code == 400
    assert PREFILL_FROM_HEADER in answer.text


def test_a_role_is_switched_without_reloading_weights(prefill: Side, decode: Side) -> None:
    core = prefill.core_pid
    try:
        assert prefill.client.post("/role", json={"role": "decode"}).json()["role"] == "decode"
        assert prefill.client.get("/readyz").json()["role"] == "decode"
        wait_until(lambda: prefill.labelled('mini_infer_engine_kv_transfer_info{role="decode"') == 1)
        before, prompt = decode.fallbacks("role"), new_prompt()
        wait_until(lambda: send_request(decode, new_prompt(), {PREFILL_FROM_HEADER: prefill.address}) is not None)
        assert text_of(send_request(decode, prompt, {PREFILL_FROM_HEADER: prefill.address}))
        wait_until(lambda: decode.fallbacks("role") > before)
        assert prefill.client.post("/role", json={"role": "both"}).status_code == 400
    finally:
        assert prefill.client.post("/role", json={"role": "prefill"}).status_code == 200
    assert prefill.client.get("/role").json() == {"role": "prefill", "running": 0}
    assert prefill.core_pid == core
    before = decode.arrived
    send_request(decode, new_prompt(), {PREFILL_FROM_HEADER: prefill.address})
    wait_until(lambda: decode.arrived == before + 1)


@pytest.fixture(scope="module")
def throttled() -> Iterator[Side]:
    """A prefill engine with a slow link, and pages of another size than the decode engine's."""
    with Side("prefill", "--kv-transfer-bandwidth", "20k", "--page-size", "64") as side:
        yield side


def test_the_configured_bandwidth_is_respected(throttled: Side, decode: Side) -> None:
    """The first transfer is slow, too: what is not known yet is waited for, and late only after the time limit."""
    sent_bytes = 'mini_infer_engine_kv_transfer_bytes_total{direction="given"}'
    before = decode.labelled(RECEIVED)
    while decode.labelled(RECEIVED) == before:  # on a busy machine it may be late
        prompt, arrived, sent_before = new_prompt(300), decode.arrived, throttled.labelled(sent_bytes)
        begin = time.monotonic()
        answer = send_request(decode, prompt, {PREFILL_FROM_HEADER: throttled.address})
        took_s = time.monotonic() - begin
        assert text_of(answer) == text_of(send_request(decode, prompt, cache_salt="own"))
        wait_until(lambda arrived=arrived: decode.arrived > arrived)  # type: ignore[misc]  # bound at once
        wait_until(throttled.is_at_rest)
    assert took_s > (throttled.labelled(sent_bytes) - sent_before) / 20_000 > 0.1


def test_a_role_switch_is_refused_when_there_is_no_transfer_port() -> None:
    with DryServer() as alone:
        answer = alone.client.post("/role", json={"role": "prefill"})
        assert answer.status_code == 409
        assert "--transfer-port" in answer.text
        assert text_of(
            send_request(alone, new_prompt(), {PREFILL_FROM_HEADER: "tcp://127.0.0.1:1"})
        )  # it computes it itself


def test_a_transfer_is_refused_when_the_weights_differ(decode: Side, tmp_path: Any) -> None:
    script = tmp_path / "script.json"
    script.write_text('[{"when": "x", "say": "y"}]')
    with Side("prefill", "--dry-run-script", str(script)) as other:
        before, prompt = decode.fallbacks("refused"), new_prompt()
        answer = send_request(decode, prompt, {PREFILL_FROM_HEADER: other.address})
        assert text_of(answer) == text_of(send_request(decode, prompt, cache_salt="own"))
        wait_until(lambda: decode.fallbacks("refused") == before + 1)
        assert "the weights differ" in decode.text_of_log
        assert other.labelled('mini_infer_engine_kv_transfers_total{direction="given"}') == 0


def test_kv_is_transferred_when_page_sizes_differ(throttled: Side, decode: Side) -> None:
    prompt, before = new_prompt(), decode.arrived
    own = send_request(decode, prompt, cache_salt="own")
    assert text_of(send_request(decode, prompt, {PREFILL_FROM_HEADER: throttled.address})) == text_of(own)
    wait_until(lambda: decode.arrived == before + 1)
    wait_until(throttled.is_at_rest)


def test_a_request_fails_with_the_reason_when_fallback_is_off() -> None:
    with Side("decode", "--no-kv-transfer-fallback") as strict:
        headers = {PREFILL_FROM_HEADER: f"tcp://127.0.0.1:{free_port()}"}
        answer = strict.client.post(PATH, json={"prompt": new_prompt(), "max_tokens": 4}, headers=headers)
        assert answer.status_code == 500
        assert "another engine" in answer.text
        wait_until(strict.is_at_rest)


SLOW = ("--dry-run-step-ms", "15", "--long-prefill-token-threshold", "64", "--kv-transfer-lease", "1")


@pytest.fixture(scope="module")
def slow() -> Iterator[tuple[Side, Side]]:
    """Prefill and decode, with time to do something to them meanwhile."""
    with Side("prefill", *SLOW) as prefill, Side("decode", *SLOW) as decode:
        yield prefill, decode


def test_both_engines_free_their_pages_when_the_client_disconnects(slow: tuple[Side, Side]) -> None:
    prefill, decode = slow
    send_request(decode, new_prompt(), {PREFILL_FROM_HEADER: prefill.address})
    for pause_s in (0.0, 0.02, 0.1, 0.2):
        with contextlib.suppress(httpx.TimeoutException):
            decode.client.post(
                PATH,
                json={"prompt": new_prompt(300), "max_tokens": 200},
                headers={PREFILL_FROM_HEADER: prefill.address},
                timeout=httpx.Timeout(5, read=0.05 + pause_s),
            )
    wait_until(decode.is_at_rest)
    wait_until(prefill.is_at_rest)


@pytest.mark.parametrize("is_arrived", [False, True], ids=["while it is computed elsewhere", "while it is decoded"])
def test_what_runs_ends_as_it_has_begun_when_roles_are_switched(slow: tuple[Side, Side], is_arrived: bool) -> None:
    """Nobody has to wait until an engine runs nothing: neither side loses what it does in its old role."""
    prefill, decode = slow
    prompt, tokens = new_prompt(300), 200
    expected = text_of(send_request(decode, prompt, cache_salt="own", max_tokens=tokens))
    before = decode.labelled(RECEIVED) + decode.fallbacks()
    try:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(
                send_request, decode, prompt, {PREFILL_FROM_HEADER: prefill.address}, max_tokens=tokens
            )
            wait_until(lambda: decode.client.get("/role").json()["running"] == 1)
            if is_arrived:
                wait_until(lambda: decode.labelled(RECEIVED) + decode.fallbacks() > before)
            for side, role in ((prefill, "decode"), (decode, "prefill")):
                assert side.client.post("/role", json={"role": role}).status_code == 200
            assert decode.client.get("/role").json() == {"role": "prefill", "running": 1}
            assert text_of(answer.result(60)) == expected
        wait_until(lambda: decode.client.get("/role").json() == {"role": "prefill", "running": 0})
    finally:
        for side, role in ((prefill, "prefill"), (decode, "decode")):
            assert side.client.post("/role", json={"role": role}).status_code == 200
    wait_until(decode.is_at_rest)
    wait_until(prefill.is_at_rest)


def test_retained_kv_is_freed_when_its_lease_expires(slow: tuple[Side, Side]) -> None:
    prefill, expired = slow[0], "mini_infer_engine_kv_transfer_expired_leases_total"
    before = prefill.metric(expired)
    answer = send_request(prefill, new_prompt(), max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    assert answer["kv_transfer_params"]
    wait_until(lambda: prefill.metric(expired) == before + 1)
    wait_until(prefill.is_at_rest)


def slow_pair(seed: int, *flags: str) -> Pair:
    """Pretended models with time to do something to them meanwhile; who waits in vain does so for 5 s, not 30."""
    flags = (*SLOW, "--kv-transfer-timeout", "5", *flags)
    return Pair(random.Random(seed), lambda role, port: Side(role, *flags, port=port), within_s=0.4)


def test_text_is_right_when_the_prefill_engine_dies_or_hangs() -> None:
    disturb(slow_pair(2), 2, hows=("kill prefill", "hold up the link"))


STAGED = ("--kv-transport", "nixl-host", "--kv-staging-memory", "4096")
"""Slots of 512 bytes hold 128 tokens of the pretended model: a prompt takes several."""
SHARED = ("--kv-transport", "shm")
OTHER_TRANSPORTS = pytest.mark.parametrize("otherwise", ["nixl-host", "shm"], indirect=True)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif("TRANSFER_DISTURBANCES" not in os.environ, reason="takes minutes: TRANSFER_DISTURBANCES=200")
@pytest.mark.parametrize("flags", [(), STAGED, SHARED], ids=["direct", "staged", "shared"])
def test_text_is_right_after_many_disturbances(flags: tuple[str, ...]) -> None:
    disturb(slow_pair(time.time_ns(), *flags), int(os.environ["TRANSFER_DISTURBANCES"]))


@pytest.fixture(scope="module")
def otherwise(request: pytest.FixtureRequest) -> Iterator[tuple[str, Side, Side]]:
    """A pair that moves keys and values through staging buffers, or in memory that both have mapped."""
    flags = STAGED if request.param == "nixl-host" else SHARED
    with Side("prefill", *flags) as prefill, Side("decode", *flags, "--kv-transfer-lease", "2") as decode:
        yield request.param, prefill, decode


@OTHER_TRANSPORTS
def test_readyz_and_metrics_report_the_configured_transport(otherwise: tuple[str, Side, Side]) -> None:
    requested_kind, *sides = otherwise
    assert {side.client.get("/readyz").json()["kv_transport"] for side in sides} == {requested_kind}
    series = f'mini_infer_engine_kv_transfer_info{{role="decode",transport="{requested_kind}"}}'
    assert sides[1].labelled(series) == 1


@OTHER_TRANSPORTS
def test_prompts_are_transferred_by_other_transports(otherwise: tuple[str, Side, Side]) -> None:
    _, prefill, decode = otherwise
    prompts = [new_prompt(words) for words in (1, 60, 300, 300, 300, 300)]
    own, before = asyncio.run(send_all(decode, prompts)), decode.arrived
    assert asyncio.run(send_all(decode, prompts, prefill.address)) == own
    wait_until(lambda: decode.arrived >= before + len(prompts))
    assert decode.labelled(RECEIVED) > 0
    wait_until(prefill.is_at_rest)
    wait_until(decode.is_at_rest)


@OTHER_TRANSPORTS
def test_retained_and_cached_kv_is_read_by_other_transports(otherwise: tuple[str, Side, Side]) -> None:
    _, prefill, decode = otherwise
    prompt, cached = new_prompt(200), new_prompt(200)
    own, before = send_request(decode, prompt, cache_salt="own"), decode.arrived
    assert text_of(proxied(prefill, decode, prompt)) == text_of(own)
    wait_until(lambda: decode.arrived == before + 1)
    send_request(prefill, cached)
    longer = cached + " and a question about it"
    own = send_request(decode, longer, cache_salt="own")
    assert text_of(send_request(decode, longer, {FETCH_FROM_HEADER: prefill.address})) == text_of(own)
    wait_until(lambda: decode.arrived + decode.fallbacks("computing_is_cheaper") >= before + 2)
    wait_until(prefill.is_at_rest)
    wait_until(decode.is_at_rest)


@OTHER_TRANSPORTS
def test_a_transfer_is_refused_when_the_transports_differ(otherwise: tuple[str, Side, Side], decode: Side) -> None:
    before, prompt = decode.fallbacks("refused"), new_prompt()
    assert text_of(send_request(decode, prompt, {PREFILL_FROM_HEADER: otherwise[1].address}))
    wait_until(lambda: decode.fallbacks("refused") == before + 1)
    assert "--kv-transport" in decode.text_of_log


@pytest.mark.parametrize(
    ("flags", "hows"),
    [
        (STAGED, ("stop decode", "cut the link")),
        (SHARED, ("kill decode", "stop prefill")),
    ],
    ids=["staged", "shared"],
)
def test_text_is_right_when_an_engine_dies_or_hangs_with_other_transports(
    flags: tuple[str, ...], hows: tuple[str, ...]
) -> None:
    """Each way of Pair.HOWS is tried with one transport; TRANSFER_DISTURBANCES tries all with all."""
    disturb(slow_pair(3, *flags), 2, hows=hows)


def test_shared_memory_is_unmapped_when_the_prefill_engine_has_died() -> None:
    def shared_pools(side: Side) -> int:
        with open(f"/proc/{side.core_pid}/maps", encoding="utf-8") as maps:
            return len({line.split()[-2] for line in maps if "/memfd:kv-" in line})

    with Side("decode", *SHARED) as decode:
        with Side("prefill", *SHARED) as prefill:
            send_request(decode, new_prompt(), {PREFILL_FROM_HEADER: prefill.address})
            assert shared_pools(decode) == 2
            prefill.kill()
        wait_until(lambda: shared_pools(decode) == 1)
        wait_until(decode.is_at_rest)
