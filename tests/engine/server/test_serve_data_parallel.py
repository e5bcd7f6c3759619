"""Several engines behind one port: where requests go, what gateways are told, and the end of one of them."""

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import zmq

from mini_infer_contract import events
from mini_infer_engine import LLM, SamplingParams
from tests.engine.server.dry_server import (
    HANG_S,
    DryServer,
    EngineServer,
    environment,
    free_port,
    serve_command,
    wait_until,
)

START_S = 90.0
"""Each engine of a real model imports torch."""


def by_engine(server: EngineServer, name: str) -> list[float]:
    lines = [line for line in server.client.get("/metrics").text.splitlines() if line.startswith(f"{name}{{")]
    found = {line.split('engine="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}
    return [found[engine] for engine in sorted(found)]


def send_request(server: EngineServer, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "dry", "prompt": prompt, "max_tokens": 5, "ignore_eos": True} | fields
    answer: dict[str, Any] = server.client.post("/v1/completions", json=body).raise_for_status().json()
    return answer


class Listener:
    """A gateway's end of the event socket: the blocks that it would think are held, and the last load report."""

    def __init__(self, port: int) -> None:
        self.stored: set[object] = set()
        self.load = events.LoadReport(0, 0, 0, 0, 0)
        self.accepted: list[str] = []
        self.last_sequence = -1
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def listen(self) -> None:
        while self._socket.poll(50):
            topic, sequence, payload = self._socket.recv_multipart()
            if topic == events.LOAD_TOPIC:
                self.load = events.decode_load(payload)
                self.accepted += self.load.accepted
                continue
            assert events.read_sequence(sequence) == self.last_sequence + 1
            self.last_sequence += 1
            for event in events.decode_batch(payload).events:
                if isinstance(event, events.BlockStored):
                    self.stored |= set(event.block_hashes)
                elif isinstance(event, events.BlockRemoved):
                    self.stored -= set(event.block_hashes)


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    return free_port(), free_port()


@pytest.fixture(scope="module")
def server(ports: tuple[int, int]) -> Iterator[DryServer]:
    flags = ("--events-port", str(ports[0]), "--replay-port", str(ports[1]), "--kv-cache-memory", "25MB")
    with DryServer(
        "-dp", "2", "--dry-run-step-ms", "2", "--max-num-seqs", "4", "--max-model-len", "1024", *flags
    ) as started:
        yield started


def test_requests_spread_over_engines_and_return_to_their_cached_prefix(server: DryServer) -> None:
    before = by_engine(server, "vllm:prompt_tokens_total")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: send_request(server, f"{number} " * 30, max_tokens=40), range(8)))
    spread = [now - then for now, then in zip(by_engine(server, "vllm:prompt_tokens_total"), before, strict=True)]
    assert sum(spread) == server.metric("mini_infer_engine_prompt_tokens_total") - sum(before)
    assert min(spread) > 0.25 * sum(spread)
    for number in range(8):
        usage = send_request(server, f"{number} " * 30)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 17


def test_choices_are_in_order_when_several_engines_serve_a_request(server: DryServer) -> None:
    answer = send_request(server, ["abc", "defg", "hij"], n=2, max_tokens=3)  # type: ignore[arg-type]
    assert [choice["text"] for choice in answer["choices"]] == ["abc", "abc", "def", "def", "hij", "hij"]


def test_a_request_is_aborted_at_its_engine_when_the_client_disconnects(server: DryServer) -> None:
    for number in range(4):
        body = {"model": "dry", "prompt": f"x{number}", "ignore_eos": True, "max_tokens": 900, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_bytes())
    wait_until(lambda: sum(by_engine(server, "vllm:num_requests_running")) == 0)


def test_events_of_all_data_parallel_engines_appear_as_one_cache(server: DryServer, ports: tuple[int, int]) -> None:
    listener = Listener(ports[0])
    sequence, chains = events.read_snapshot(server.client.get("/kv_snapshot").content)
    listener.stored = {name for chain in chains for name in chain.block_hashes}
    listener.last_sequence = sequence
    wait_until(lambda: listener.listen() or listener.load.ts > 0)  # type: ignore[func-returns-value]
    prompts = [f"{number}{'much is said ' * 40}" for number in range(24)]  # more than two small caches hold
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda prompt: send_request(server, prompt), prompts))
    client = server.client.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "mine"})
    assert client.status_code == 200
    wait_until(lambda: listener.listen() or listener.load.running + listener.load.waiting == 0)  # type: ignore[func-returns-value]
    wait_until(lambda: listener.listen() or "mine" in listener.accepted)  # type: ignore[func-returns-value]
    assert listener.load.engines == 2
    now, chains = events.read_snapshot(server.client.get("/kv_snapshot").content)
    assert {name for chain in chains for name in chain.block_hashes} == listener.stored
    assert now == listener.last_sequence
    replay = zmq.Context.instance().socket(zmq.DEALER)
    replay.connect(f"tcp://127.0.0.1:{ports[1]}")
    for _ in range(2):
        replay.send_multipart([b"", events.sequence_frame(now)])
        assert replay.poll(60_000)
        reply = events.read_replay_reply(replay.recv_multipart())
        assert reply is not None
        assert reply[0] == now
        assert replay.poll(60_000)
        assert events.read_replay_reply(replay.recv_multipart()) is None


def test_metrics_have_a_label_for_each_engine(server: DryServer) -> None:
    for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:time_to_first_token_seconds_count"):
        assert len(by_engine(server, name)) == 2
    first = by_engine(server, "vllm:time_to_first_token_seconds_count")
    assert server.metric("mini_infer_engine_time_to_first_token_seconds_count") == sum(first)
    assert server.client.get("/readyz").json()["data_parallel_size"] == 2
    assert "engine 1 ready" in server.text_of_log


def test_four_data_parallel_engines_share_requests_behind_one_port() -> None:
    with DryServer("--data-parallel-size", "4", "--dry-run-step-ms", "5") as four:
        assert len(four.core_pids) == four.client.get("/readyz").json()["data_parallel_size"] == 4
        prompts = [f"{number} is said " * 20 for number in range(8)]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda prompt: send_request(four, prompt, max_tokens=30), prompts))
        assert [answer["choices"][0]["text"] for answer in answers] == [prompt[:30] for prompt in prompts]
        spread = by_engine(four, "vllm:generation_tokens_total")
        assert len(spread) == 4
        assert min(spread) > 0
        assert sum(spread) == 8 * 30
        for prompt in prompts:  # each is known where it was
            assert send_request(four, prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(prompt) - 17
        os.kill(four.core_pids[3], signal.SIGKILL)
        assert four.wait() == 1
        assert "engine 3: the core process has failed" in four.log[-1]


class Stream:
    def __init__(self, server: EngineServer, prompt: str, max_tokens: int) -> None:
        self.text = ""
        self._request = server.url, {"model": "dry", "prompt": prompt, "ignore_eos": True, "stream": True}
        self._request[1]["max_tokens"] = max_tokens
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        url, body = self._request
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            for part in response.iter_text():
                self.text += part


def test_the_end_of_an_engine_ends_the_server_when_the_others_have_finished() -> None:
    with DryServer("-dp", "2", "--dry-run-step-ms", "5") as server:
        streams = [Stream(server, f"{number} stream", 1200) for number in range(4)]
        wait_until(lambda: all("data:" in stream.text for stream in streams))
        wait_until(lambda: by_engine(server, "vllm:num_requests_running") == [2, 2])
        os.kill(server.core_pids[1], signal.SIGKILL)
        wait_until(lambda: server.client.get("/healthz").status_code == 503)
        assert "engine 1" in server.client.get("/healthz").json()["reason"]
        assert server.client.get("/readyz").status_code == 503
        refused = server.client.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert refused.headers["x-mini-infer-draining"] == "true"
        server.process.send_signal(signal.SIGTERM)  # as a kubelet does when /healthz fails
        for stream in streams:
            stream.thread.join(HANG_S)
        assert sum(stream.text.endswith("data: [DONE]\n\n") and "error" not in stream.text for stream in streams) == 2
        assert sum("core process has failed" in stream.text for stream in streams) == 2
        assert server.wait() == 1
        assert "engine 1: the core process has failed: it ended with status -9" in server.log[-1]


def test_data_parallelism_is_refused_by_name_when_flags_conflict() -> None:
    for flags, reason in (
        (("--transfer-port", "5559"), "KV transfer needs --data-parallel-size 1"),
        (("--role", "decode"), "KV transfer needs --data-parallel-size 1"),
        (("--nnodes", "2", "-tp", "2"), "data-parallel-size = 2 does not go with nnodes = 2"),
    ):
        command = serve_command("--dry-run", "--port", "0", "-dp", "2", *flags)
        ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode in (1, 2)
        assert reason in ended.stderr


def test_text_equals_one_engines_when_data_parallel_engines_serve_the_demo_model() -> None:
    prompts = [f"def f{number}(values):\n    " for number in range(6)]
    alone = LLM("demo", device="cpu", kv_cache_memory=30_000_000)
    made = alone.generate(prompts, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    with EngineServer("demo", "--device", "cpu", "--kv-cache-memory", "30MB", "-dp", "2", limit_s=START_S) as server:
        with ThreadPoolExecutor(6) as pool:
            fields = {"temperature": 0, "max_tokens": 16, "model": "demo", "logprobs": 1, "ignore_eos": False}
            answers = list(pool.map(lambda prompt: send_request(server, prompt, **fields), prompts))
        assert [one["choices"][0]["text"] for one in answers] == [one.outputs[0].text for one in made]
        assert min(by_engine(server, "vllm:prompt_tokens_total")) > 0
        beams = send_request(
            server, prompts[0], model="demo", n=3, use_beam_search=True, max_tokens=6, ignore_eos=False
        )
        assert len({choice["text"] for choice in beams["choices"]}) == 3
        messages = [{"role": "user", "content": "Write a function that sorts names, and say how it works. " * 4}]
        before = 0
        for turn in range(4):
            chat = {"messages": messages, "max_tokens": 12, "temperature": 0}
            answer = server.client.post("/v1/chat/completions", json=chat).json()
            usage = answer["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= before - 16
            before = usage["prompt_tokens"]
            messages += [answer["choices"][0]["message"], {"role": "user", "content": f"And number {turn}?"}]


def test_the_server_exits_with_the_reason_when_an_engine_cannot_start() -> None:
    command = serve_command("--dry-run", "--port", "0", "-dp", "2", "--page-size", "16", "--kv-cache-memory", "1")
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=HANG_S, check=False)
    assert ended.returncode == 1
    assert re.search("engine [01]: .*kv-cache-memory", ended.stderr.splitlines()[-1])
