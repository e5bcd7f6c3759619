"""How a server starts, drains and ends: each test that ends its server, or needs flags for itself, has its own."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from mini_infer_web.tls import client_context
from tests.engine.server.dry_server import HANG_S, DryServer, environment, free_port, serve_command, wait_until
from tests.support.tls_files import make_ca, make_certificate, needs_openssl

SLOW = ("--dry-run-step-ms", "5", "--max-model-len", "2048")


def body(max_tokens: int = 2000, stream: bool = True) -> dict[str, object]:
    return {"model": "dry", "prompt": "x", "ignore_eos": True, "max_tokens": max_tokens, "stream": stream}


class RunningRequest:
    """A request in a thread."""

    def __init__(self, server: DryServer, **fields: object) -> None:
        self.status = 0
        self.headers = httpx.Headers()
        self.text = ""
        self._url = f"{server.url}/v1/completions"
        self._body = body(**fields)  # type: ignore[arg-type]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=60) as response:
            self.status, self.headers = response.status_code, response.headers
            for part in response.iter_text():
                self.text += part

    def join(self) -> None:
        self._thread.join(HANG_S)
        assert not self._thread.is_alive()


@contextmanager
def running(server: DryServer, count: int, **fields: object) -> Iterator[list[RunningRequest]]:
    requests = [RunningRequest(server, **fields) for _ in range(count)]
    wait_until(lambda: server.metric("vllm:num_requests_running") == count)
    yield requests
    for request in requests:
        request.join()


@contextmanager
def blocked_requests(server: DryServer, count: int) -> Iterator[list[RunningRequest]]:
    """Requests in the middle of their streams, which go on and end only after the block: their core is stopped."""
    core = server.core_pid
    os.kill(core, signal.SIGSTOP)
    try:
        requests = [RunningRequest(server, max_tokens=400) for _ in range(count)]
        wait_until(lambda: server.client.get("/drain").json()["running"] == count)
        os.kill(core, signal.SIGCONT)
        wait_until(lambda: all(request.text for request in requests))
        os.kill(core, signal.SIGSTOP)
        yield requests
    finally:
        os.kill(core, signal.SIGCONT)
    for request in requests:
        request.join()


def cut_stream(server: DryServer, max_tokens: int, *limits_s: float) -> tuple[float, list[str]]:
    """Returns the limit in seconds after which a stream was cut, and its lines.

    A busy machine may take longer for the first token than a short limit allows, and answer 408: the next limit is
    tried then.
    """
    for limit_s in limits_s:
        headers = {"x-request-timeout": str(limit_s)}
        with server.client.stream("POST", "/v1/completions", json=body(max_tokens), headers=headers) as answer:
            lines = [line for line in answer.iter_lines() if line]
        if answer.status_code == 200:
            return limit_s, lines
    raise AssertionError(f"no token came within {limits_s}")


def process_has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] == "Z"


@pytest.fixture(scope="module")
def events_port() -> str:
    return str(free_port())


@pytest.fixture(scope="module")
def lasting(events_port: str) -> Iterator[DryServer]:
    """Returns a server that its tests leave as they find it."""
    with DryServer(*SLOW, "--health-timeout", "0.5", "--events-port", events_port) as server:
        yield server


def test_draining_finishes_running_requests_and_refuses_new_ones() -> None:
    with DryServer(*SLOW) as server:
        with blocked_requests(server, 2) as requests:
            assert server.client.post("/drain").json() == {"draining": True, "running": 2}
            assert server.client.get("/readyz").status_code == 503
            assert server.client.get("/healthz").status_code == 200
            refused = server.client.post("/v1/completions", json=body())
            assert refused.status_code == 503
            assert refused.headers["x-mini-infer-draining"] == "true"
            assert refused.json()["error"]["code"] == "draining"
            assert server.metric("mini_infer_engine_draining") == 1
        assert all(request.text.endswith("data: [DONE]\n\n") for request in requests)
        assert server.client.get("/drain").json() == {"draining": True, "running": 0}


def test_a_drain_waits_for_a_request_whose_body_is_incomplete() -> None:
    with DryServer() as server:
        host, port = server.url.removeprefix("http://").split(":")
        payload = json.dumps(body(3)).encode()
        with socket.create_connection((host, int(port)), timeout=30) as slow:
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(payload)
            )
            wait_until(lambda: server.client.get("/drain").json()["running"] == 1)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.client.get("/readyz").status_code == 503)
            slow.sendall(payload)
            answer = b""
            while part := slow.recv(65536):
                answer += part
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"x-mini-infer-draining: true" in answer
        assert server.wait() == 0


def test_access_log_has_a_line_a_request_and_warnings_for_failures() -> None:
    with DryServer("--log-format", "json", "--dry-run-step-ms", "1") as server:
        headers = {"x-request-id": "mine"}
        server.client.post("/v1/completions", json=body(5, stream=False), headers=headers)
        server.client.post("/v1/completions", json=body(5) | {"n": 2}).raise_for_status()
        server.client.post("/v1/completions", json={"prompt": "x", "nonsense": 1})
        limit_s, _ = cut_stream(server, 3000, 0.2, 1.0, 5.0)
        server.client.get("/healthz")
        server.client.get("/nothing")
        wait_until(lambda: "/nothing" in server.text_of_log)
    lines = [json.loads(line) for line in server.log]
    access_lines = [line for line in lines if line["logger"].endswith("access_log")]
    whole, streamed, refused, *_, cut, missing = [
        line for line in access_lines if line["path"] != "/readyz"
    ]  # asked before it was ready
    assert {"method": "POST", "path": "/v1/completions", "status": 200, "request_id": "mine"}.items() <= whole.items()
    assert (whole["model"], whole["prompt_tokens"], whole["completion_tokens"]) == ("dry", 1, 5)
    assert whole["level"] == "info"
    assert 0 < whole["first_token_s"] <= whole["duration_s"]
    assert (streamed["completion_tokens"], streamed["finish_reason"]) == (10, "length,length")
    assert (refused["status"], refused["level"]) == (400, "warning")
    assert "nonsense" in refused["error"]
    assert "nonsense" in refused["message"]
    assert (cut["status"], cut["level"]) == (200, "warning")
    assert f"has not been finished within {limit_s:g} s" in cut["message"]
    assert (missing["status"], missing["path"]) == (404, "/nothing")


def test_access_log_is_text_by_default_and_can_be_switched_off(lasting: DryServer) -> None:
    with DryServer("--no-access-log") as quiet:
        for server in (quiet, lasting):
            server.client.post("/v1/completions", json=body(2))
        wait_until(lambda: "POST /v1/completions 200 in " in lasting.text_of_log)
    assert "POST" not in quiet.text_of_log
    assert ", 1 + 2 tokens, first after " in lasting.text_of_log


def test_a_request_gets_408_when_its_body_does_not_arrive() -> None:
    with DryServer("--body-timeout", "0.3") as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as slow:
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: 100\r\n\r\n{"
            )
            answer = b""
            while part := slow.recv(65536):  # until the server closes
                answer += part
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"--body-timeout" in answer
        wait_until(lambda: server.client.get("/drain").json()["running"] == 0)


def test_a_request_gets_429_when_too_many_wait() -> None:
    with DryServer(*SLOW, "--max-num-seqs", "1", "--max-waiting", "1") as server:
        requests = [RunningRequest(server, max_tokens=400) for _ in range(2)]
        wait_until(lambda: server.metric("vllm:num_requests_waiting") == 1)
        os.kill(server.core_pid, signal.SIGSTOP)  # or the first one may end before there is a third
        try:
            refused = server.client.post("/v1/completions", json=body(1))
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert server.client.post("/v1/completions", json=body(1) | {"n": 3}).status_code == 429
        finally:
            os.kill(server.core_pid, signal.SIGCONT)
        for request in requests:
            request.join()
            assert request.text.endswith("data: [DONE]\n\n")
        assert server.client.post("/v1/completions", json=body(1)).status_code == 200


def test_health_fails_when_the_core_hangs_and_recovers(lasting: DryServer) -> None:
    core = lasting.core_pid
    os.kill(core, signal.SIGSTOP)
    try:
        time.sleep(0.7)  # a core without work may be silent for as long as it likes
        assert lasting.client.get("/healthz").status_code == 200
        begun_s = time.monotonic()
        request = RunningRequest(lasting, max_tokens=50)
        wait_until(lambda: lasting.client.get("/healthz").status_code == 503)
        assert time.monotonic() - begun_s >= 0.5
        assert lasting.client.get("/readyz").status_code == 503
        assert "no step for" in lasting.client.get("/healthz").json()["reason"]
    finally:
        os.kill(core, signal.SIGCONT)
    request.join()
    assert request.text.endswith("data: [DONE]\n\n")
    assert lasting.client.get("/healthz").status_code == 200
    assert lasting.client.get("/readyz").status_code == 200


def test_requests_finish_before_exit_when_the_server_gets_sigterm() -> None:
    with DryServer(*SLOW) as server:
        with blocked_requests(server, 1) as requests:
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.client.get("/readyz").status_code == 503)
        assert requests[0].text.endswith("data: [DONE]\n\n")
        assert server.wait() == 0
        assert "Traceback" not in server.text_of_log


def test_the_server_exits_after_the_drain_timeout_when_it_gets_sigterm() -> None:
    with DryServer(*SLOW, "--drain-timeout", "0.3") as server:
        core = server.core_pid
        with running(server, 1) as requests:
            server.process.send_signal(signal.SIGTERM)
            assert server.wait() == 0
        assert json.loads(requests[0].text.split("data: ")[-1])["error"]["code"] == "stopping"
        wait_until(lambda: process_has_ended(core))


def test_the_server_exits_without_a_traceback_when_interrupted() -> None:
    with DryServer(*SLOW) as server:
        core = server.core_pid
        with running(server, 2) as requests:
            for pid in (server.process.pid, core):  # a terminal signals the whole group
                os.kill(pid, signal.SIGINT)
            assert server.wait() == 0
        assert not any(request.text.endswith("data: [DONE]\n\n") for request in requests)
        assert process_has_ended(core)
        assert "Traceback" not in server.text_of_log
        assert "rror" not in server.text_of_log


def test_streams_end_with_an_error_and_the_server_exits_when_the_core_dies() -> None:
    with DryServer(*SLOW) as server:
        with running(server, 1) as streams, running_whole(server) as whole:
            os.kill(server.core_pid, signal.SIGKILL)
            wait_until(lambda: server.client.get("/healthz").status_code == 503)
            refused = server.client.post("/v1/completions", json=body())
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
            assert "ended with status -9" in refused.json()["error"]["message"]  # its silence is noticed later
        last = streams[0].text.split("data: ")[-1]
        assert json.loads(last)["error"]["code"] == "engine_dead"
        assert (whole.status, json.loads(whole.text)["error"]["code"]) == (503, "engine_dead")
        assert server.wait() == 1
        assert "Traceback" not in server.text_of_log
        assert any("/healthz 503" in line for line in server.log)
        assert server.log[-1].endswith(": the core process has failed: it ended with status -9\n")


@contextmanager
def running_whole(server: DryServer) -> Iterator[RunningRequest]:
    request = RunningRequest(server, stream=False)
    wait_until(lambda: server.metric("vllm:num_requests_running") == 2)
    yield request
    request.join()


def test_the_core_ends_when_its_parent_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with DryServer(*SLOW) as server:
        core = server.core_pid
        server.process.kill()
        server.wait()
        wait_until(lambda: process_has_ended(core))
    assert list(tmp_path.iterdir()) == []


def run_to_its_end(*flags: str) -> tuple[int, str]:
    done = subprocess.run(
        serve_command(*flags), capture_output=True, text=True, timeout=60, env=environment(), check=False
    )
    return done.returncode, done.stderr


def test_the_error_is_one_line_when_the_port_is_in_use(lasting: DryServer) -> None:
    port = lasting.url.rsplit(":", 1)[1]
    status, log = run_to_its_end("--dry-run", "--port", port)
    assert status == 1
    assert log.count("\n") == 1
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in log


@pytest.mark.usefixtures("lasting")
def test_the_error_names_the_events_port_when_it_is_in_use(events_port: str) -> None:
    status, log = run_to_its_end("--dry-run", "--port", "0", "--events-port", events_port)
    assert status == 1
    assert "choose another --events-port" in log.splitlines()[-1]
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "/no/such/folder"), "there is no such folder"),
        (("--model", "/tmp"), "config.json is missing: name a model folder"),
        (("--dry-run", "--kv-cache-memory", "1MiB"), "raise --kv-cache-memory"),
        (("--dry-run", "--kv-transport", "nixl"), "--kv-transport moves nothing without a transfer port"),
        (("--dry-run", "--role", "decode", "--transfer-port", "0"), "--role decode needs a transfer port"),
    ],
)
def test_start_fails_without_a_traceback_when_the_model_cannot_be_served(flags: tuple[str, ...], message: str) -> None:
    status, log = run_to_its_end("--port", "0", *flags)
    assert status == 1
    assert message in log.splitlines()[-1]
    assert log.count(message) == 1
    assert "Traceback" not in log


def test_requests_need_a_key_when_the_server_has_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINI_INFER_API_KEY", "sk-environment")
    file = tmp_path / "keys"
    file.write_text("sk-file\n")
    with DryServer("--api-key", "sk-one", "sk-two", "--api-key-file", str(file)) as server:
        refused = server.client.get("/v1/models", headers={"authorization": "Bearer sk-wrong"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert refused.json()["error"]["type"] == "invalid_request_error"
        assert (refused.headers["www-authenticate"], len(refused.headers["x-request-id"])) == ("Bearer", 32)
        for path in ("/v1/models", "/prompt_assets", "/kv_snapshot", "/nothing", "/tokenizer_info"):
            assert server.client.get(path).status_code == 401
        for path in ("/healthz", "/readyz", "/metrics", "/health", "/version", "/drain"):
            assert server.client.get(path).status_code == 200
        for key in ("sk-one", "sk-two", "sk-file", "sk-environment"):
            assert server.client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
        assert server.client.get("/v1/models", headers={"x-api-key": "sk-two"}).status_code == 200
    assert "sk-" not in server.text_of_log


def test_the_server_exits_with_the_reason_when_the_key_file_is_missing(tmp_path: Path) -> None:
    command = serve_command("--dry-run", "--port", "0", "--api-key-file", str(tmp_path / "none"))
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "API keys" in done.stderr


@needs_openssl
def test_cors_and_tls_are_served(tmp_path: Path) -> None:
    ca = make_ca(tmp_path)
    cert, key = make_certificate(tmp_path, "server")
    browser = {"origin": "https://chat.example.com", "access-control-request-method": "POST"}
    flags = (
        "--allowed-origins",
        '["https://chat.example.com"]',
        "--ssl-certfile",
        str(cert),
        "--ssl-keyfile",
        str(key),
    )
    with DryServer(*flags, "--api-key", "sk-1", verify=client_context(str(ca))) as server:
        assert server.url.startswith("https://")
        requested = server.client.options("/v1/chat/completions", headers=browser)
        assert (requested.status_code, requested.headers["allow"]) == (204, "OPTIONS, POST")
        assert requested.headers["access-control-allow-origin"] == "https://chat.example.com"
        assert server.client.options("/nothing").status_code == 204
        refused = server.client.get("/v1/models", headers=browser)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://chat.example.com"
        authorized = {"authorization": "Bearer sk-1"}
        answer = server.client.post("/v1/completions", json=body(3, stream=False), headers=authorized)
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers


def test_the_server_exits_with_the_reason_when_tls_files_are_missing(tmp_path: Path) -> None:
    command = serve_command("--dry-run", "--port", "0", "--ssl-certfile", str(tmp_path / "none"))
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "TLS: no certificate" in done.stderr


def test_a_request_gets_408_when_it_exceeds_the_request_timeout() -> None:
    with DryServer(*SLOW, "--request-timeout", "0.5") as server:
        late = server.client.post("/v1/completions", json=body(stream=False))
        assert (late.status_code, late.json()["error"]["code"]) == (408, "request_timeout")
        assert "0.5 s" in late.json()["error"]["message"]
        limit_s, events = cut_stream(server, 2000, 0.3, *[0.45] * 20)  # the server's own limit is half a second
        assert len(events) > 2
        error = json.loads(events[-1].removeprefix("data: "))["error"]
        assert (error["code"], f"{limit_s:g} s" in error["message"]) == ("request_timeout", True)
        refused = server.client.post("/v1/completions", json=body(1), headers={"x-request-timeout": "soon"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-request-timeout")
        wait_until(lambda: server.metric("vllm:num_requests_running") == 0)
        assert server.client.post("/v1/completions", json=body(1, stream=False)).status_code == 200


def test_sse_comments_are_sent_when_a_stream_waits_for_its_first_token() -> None:

    def stream(**headers: str) -> tuple[int, list[str]]:
        """Returns the status and the lines of a stream that had comments: a busy machine may not get round to them."""
        for _ in range(5):
            with server.client.stream("POST", "/v1/completions", json=body(2), headers=headers) as answer:
                lines = [line for line in answer.iter_lines() if line]
            if lines[0] == ": waiting":
                break
        return answer.status_code, lines

    with DryServer("--dry-run-step-ms", "400", "--sse-keepalive", "0.1") as server:
        _, lines = stream()
        assert lines[0] == ": waiting"
        assert lines[-1] == "data: [DONE]"
        answer = [line for line in lines if line.startswith("data: {")]
        assert lines == [*[": waiting"] * (len(lines) - len(answer) - 1), *answer, "data: [DONE]"]
        # From then on an error is told inside of the stream.
        status, lines = stream(**{"x-request-timeout": "0.3"})
        assert (status, lines[0]) == (200, ": waiting")
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "request_timeout"
        # Before, it has its own status.
        early = server.client.post("/v1/completions", json=body(2), headers={"x-request-timeout": "0.05"})
        assert early.status_code == 408


VLLMS = """num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc
prefix_cache_queries_total prefix_cache_hits_total num_preemptions_total prompt_tokens_total prompt_tokens_cached_total
prompt_tokens_by_source_total generation_tokens_total request_success_total cache_config_info lora_requests_info"""
VLLMS_HISTOGRAMS = """iteration_tokens_total request_prompt_tokens request_generation_tokens request_params_n
request_params_max_tokens request_max_num_generation_tokens request_prefill_kv_computed_tokens
time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds
e2e_request_latency_seconds
request_queue_time_seconds request_inference_time_seconds
request_prefill_time_seconds request_decode_time_seconds"""


def test_vllm_metrics_have_the_values_of_vllms_own_test() -> None:
    """Ten equal requests of one prompt, as tests/entrypoints/serve/instrumentator/test_metrics.py asks for them."""
    requests, prompt, max_tokens = 10, "x" * 40, 10
    with DryServer("--dry-run-step-ms", "1") as server:
        for _ in range(requests):
            requested = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
            server.client.post("/v1/completions", json=requested).raise_for_status()
        total = {
            "time_to_first_token_seconds_count": requests,
            "inter_token_latency_seconds_count": requests * (max_tokens - 1),
            "request_prompt_tokens_sum": requests * len(prompt),
            "request_generation_tokens_sum": requests * max_tokens,
            "request_params_n_count": requests,
            "request_params_n_sum": requests,
            "request_params_max_tokens_sum": requests * max_tokens,
            "request_max_num_generation_tokens_sum": requests * max_tokens,
            "iteration_tokens_total_sum": requests * (len(prompt) + max_tokens),
            "iteration_tokens_total_count": requests * max_tokens,
            "prompt_tokens_total": requests * len(prompt),
            "prompt_tokens_by_source_total": requests * len(prompt),
            "generation_tokens_total": requests * max_tokens,
            "request_success_total": requests,
        }
        for phase in ("queue", "prefill", "decode", "inference"):
            total[f"request_{phase}_time_seconds_count"] = requests
        text = server.client.get("/metrics").text
        found = {name: server.metric(f"vllm:{name}") for name in total}
        assert found == total
        for name in VLLMS.split():
            assert f"\nvllm:{name}{{" in text, name
        for name in VLLMS_HISTOGRAMS.split():
            assert f"\nvllm:{name}_bucket{{" in text, name
        phases = [
            server.metric(f"vllm:request_{phase}_time_seconds_sum") for phase in ("prefill", "decode", "inference")
        ]
        assert phases[2] == pytest.approx(phases[0] + phases[1])
