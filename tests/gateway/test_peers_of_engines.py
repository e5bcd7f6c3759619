"""Engines and gateways of one service find each other by keys, over real sockets; whoever has none gets nothing."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq
from msgspec.structs import replace

from mini_infer_contract import events
from mini_infer_contract.launch import PREFILL_FROM_HEADER, Endpoint
from mini_infer_contract.peer_auth import PEER_HEADER, PeerSecret
from mini_infer_process.curve import secure_client
from mini_infer_process.listening import has_ipv6
from tests.engine.server.dry_server import DryServer, free_port, wait_until
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import running_gateway, until
from tests.support.transfer_sides import RECEIVED, Counted, new_prompt, send_request, text_of

ROOT = PeerSecret(bytes(range(32)))
SERVICE = "team/chat"
SECRET = ROOT.for_service(SERVICE)
OTHERS = {"no keys": None, "keys of another service": ROOT.for_service("team/other"), "root keys": ROOT}
TOKEN = {PEER_HEADER: SECRET.http_token()}
SILENCE_MS = 1_000


class Engine(Counted, DryServer):
    """A dry engine with all ports of peers, and the secret of its service."""

    def __init__(self, folder: Path, *flags: str, host: str = "127.0.0.1", secret: PeerSecret = SECRET) -> None:
        self.ports = [free_port() for _ in range(3)]
        self.host = f"[{host}]" if ":" in host else host
        self.secret, key = secret, folder / "key"
        key.write_text(secret.hex() + "\n")
        ports = dict(zip(("--events-port", "--replay-port", "--transfer-port"), map(str, self.ports), strict=True))
        named = [part for pair in ports.items() for part in pair]
        super().__init__("--host", host, "--peer-key-file", str(key), *named, *flags)

    def address_of(self, port: int) -> str:
        return f"tcp://{self.host}:{self.ports[port]}"

    def endpoint(self, name: str = "one", **fields: Any) -> Endpoint:
        events_at, replay, transfer = (self.address_of(port) for port in range(3))
        known = {"service": SERVICE, "peer_auth": "service", "transfer": transfer} | fields
        return Endpoint(name=name, url=self.url, model="dry", events=events_at, replay=replay, **known)

    def complete(self, prompt: str, **headers: str) -> dict[str, Any]:
        body = {"model": "dry", "prompt": prompt, "max_tokens": 4}
        answer = self.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(tmp_path_factory.mktemp("engine")) as server:
        yield server


def connect(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str, secret: PeerSecret | None
) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.IPV6, 1)
    secure_client(socket, secret)
    if kind == zmq.SUB:
        socket.subscribe(b"")
    socket.connect(address)
    return socket


@pytest.mark.parametrize("secret", OTHERS.values(), ids=OTHERS)
def test_a_peer_gets_nothing_from_any_port_when_it_lacks_the_services_keys(
    engine: Engine, secret: PeerSecret | None
) -> None:
    with zmq.Context() as context:
        subscriber = connect(context, zmq.SUB, engine.address_of(0), secret)
        replay = connect(context, zmq.DEALER, engine.address_of(1), secret)
        transfer = connect(context, zmq.DEALER, engine.address_of(2), secret)
        for socket, frames in ((replay, [b"", events.sequence_frame(0)]), (transfer, [b"\x81\xa4type\xa5hello"])):
            with suppress(zmq.Again):  # one that was refused already takes nothing, and would wait for ever
                socket.send_multipart(frames, zmq.NOBLOCK)
        engine.complete(f"a secret prompt of another tenant {time.time()}")
        poller = zmq.Poller()
        for socket in (subscriber, replay, transfer):
            poller.register(socket, zmq.POLLIN)
        assert poller.poll(SILENCE_MS) == []
        for socket in (subscriber, replay, transfer):
            socket.close(0)


def test_a_peer_gets_events_and_replays_when_it_has_the_services_keys(engine: Engine) -> None:
    with zmq.Context() as context:
        subscriber = connect(context, zmq.SUB, engine.address_of(0), SECRET)
        assert subscriber.poll(20_000)
        engine.complete(f"a prompt of more than sixteen tokens {time.time()}")
        replay = connect(context, zmq.DEALER, engine.address_of(1), SECRET)
        replay.send_multipart([b"", events.sequence_frame(0)])
        assert replay.poll(20_000)
        assert events.read_replay_reply(replay.recv_multipart()) is not None
        subscriber.close(0)
        replay.close(0)


@pytest.mark.parametrize(("method", "path"), [("POST", "/drain"), ("POST", "/role"), ("GET", "/kv_snapshot")])
def test_admin_paths_need_the_token_when_an_engine_has_keys(engine: Engine, method: str, path: str) -> None:
    for headers in ({}, {PEER_HEADER: "1"}, {PEER_HEADER: ROOT.http_token()}):
        answer = httpx.request(
            method, engine.url + path, json={"role": "unified"} if method == "POST" else None, headers=headers
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "peer_not_authenticated")
    if path == "/kv_snapshot":
        assert httpx.get(engine.url + path, headers=TOKEN, timeout=60).status_code == 200
    assert httpx.get(engine.url + "/drain", timeout=60).json()["draining"] is False


async def test_a_gateway_follows_an_engine_when_its_root_secret_is_the_right_one(engine: Engine) -> None:
    async with running_gateway(engine.endpoint(), peer_secret=ROOT) as gateway:
        await gateway.settled()
        body = {"model": "dry", "prompt": f"sixteen tokens and some more of them {time.time()}", "max_tokens": 1}
        stored = gateway.app.index.cached_blocks("one")
        async with gateway.client.post(gateway.url + "/v1/completions", json=body) as answer:
            assert answer.status == 200
        await until(lambda: gateway.app.index.cached_blocks("one") > stored)
        (state,) = gateway.app.fleet.endpoints.values()
        assert state.subscriber.events_state == "live"


@pytest.mark.parametrize(
    ("root", "fields"),
    [
        (PeerSecret(bytes(32)), {}),
        (None, {}),
        (ROOT, {"service": "team/other"}),
        (ROOT, {"peer_auth": "shared"}),
        (ROOT, {"peer_auth": ""}),
    ],
    ids=["another root", "no root", "another service", "not derived", "no proof"],
)
async def test_a_gateway_says_that_it_is_refused_when_keys_differ(
    engine: Engine, root: PeerSecret | None, fields: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with running_gateway(engine.endpoint(**fields), peer_secret=root) as gateway:
        (state,) = gateway.app.fleet.endpoints.values()
        await until(lambda: state.subscriber.refused)
        assert state.subscriber.events_state == "refused"
        await until(lambda: "PeerRefusedError" in caplog.text)
        body = {"model": "dry", "prompt": "requests are served all the same", "max_tokens": 1}
        async with gateway.client.post(gateway.url + "/v1/completions", json=body) as answer:
            assert answer.status == 200


async def test_a_clients_peer_header_is_stripped_in_any_letter_case() -> None:
    async with FakeEngine("f") as fake:
        endpoint = replace(fake.endpoint, peer_auth="service", service=SERVICE, events="", replay="")
        async with running_gateway(endpoint, peer_secret=ROOT) as gateway:
            for name in (PEER_HEADER, PEER_HEADER.title(), PEER_HEADER.upper()):
                body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
                url = gateway.url + "/v1/chat/completions"
                async with gateway.client.post(url, json=body, headers={name: "forged"}) as answer:
                    assert answer.status == 200
                sent = [value for key, value in fake.headers[-1].items() if key.lower() == PEER_HEADER]
                assert sent == [SECRET.http_token()]


async def test_an_engine_gets_no_token_when_it_needs_no_authentication() -> None:
    async with FakeEngine("f") as fake, running_gateway(fake.endpoint, peer_secret=ROOT) as gateway:
        await gateway.settled()
        async with gateway.chat("hi") as answer:
            assert answer.status == 200
        assert PEER_HEADER not in {key.lower() for key in fake.headers[-1]}


def test_two_engines_exchange_a_prompt_when_both_have_the_secret(tmp_path: Path) -> None:
    for name in ("p", "d", "x"):
        (tmp_path / name).mkdir()
    with (
        Engine(tmp_path / "p", "--role", "prefill", host="::1" if has_ipv6() else "127.0.0.1") as prefill,
        Engine(tmp_path / "d", "--role", "decode") as decode,
        Engine(tmp_path / "x", "--role", "decode", secret=ROOT.for_service("team/other")) as stranger,
    ):
        for side, comes in ((decode, True), (stranger, False)):
            prompt = new_prompt()
            own = send_request(side, prompt, cache_salt="own")
            proof = {PEER_HEADER: side.secret.http_token()}
            answer = send_request(side, prompt, {PREFILL_FROM_HEADER: prefill.address_of(2)} | proof)
            assert text_of(answer) == text_of(own)
            if comes:
                wait_until(lambda: decode.arrived == 1)
            else:
                wait_until(lambda: stranger.fallbacks() == 1)
                assert stranger.labelled(RECEIVED) == 0


def test_requests_are_served_when_a_peer_sends_hostile_replays(tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    with DryServer("--events-port", str(ports[0]), "--replay-port", str(ports[1]), "--dry-run-step-ms", "2") as server:
        for number in range(60):
            body = {"model": "dry", "prompt": f"{number} " * 800, "max_tokens": 1}
            assert server.client.post("/v1/completions", json=body).status_code == 200

        def cpu_s() -> float:
            """Processor time of the engine for a hundred tokens: the attacker's own share of the machine is none."""
            body = {"model": "dry", "prompt": f"{time.time()}", "max_tokens": 100, "ignore_eos": True}
            begun_s = server.cpu_s
            answer = server.client.post("/v1/completions", json=body, timeout=60)
            assert answer.json()["usage"]["completion_tokens"] == 100
            return server.cpu_s - begun_s

        quiet_s = min(cpu_s() for _ in range(2))
        stop = threading.Event()

        def attack() -> None:
            with zmq.Context() as context:
                sockets = [connect(context, zmq.DEALER, f"tcp://127.0.0.1:{ports[1]}", None) for _ in range(4)]
                while not stop.is_set():
                    for socket in sockets:
                        for _ in range(50):
                            try:
                                socket.send_multipart([b"", events.sequence_frame(0)], zmq.NOBLOCK)
                            except zmq.Again:
                                break
                    stop.wait(0.001)
                for socket in sockets:
                    socket.close(0)

        attacker = threading.Thread(target=attack)
        attacker.start()
        try:
            wait_until(lambda: "is dropped" in server.text_of_log)
            loud_s = min(cpu_s() for _ in range(2))
        finally:
            stop.set()
            attacker.join()
        # Unbounded, four such sockets stop it for minutes; the bound leaves the attacker its share of two cores.
        assert loud_s < 3 * quiet_s + 1.0
