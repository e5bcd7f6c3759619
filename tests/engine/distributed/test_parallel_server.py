"""Servers of tensor-parallel groups: text, metrics, the end of a rank while clients wait, and groups of two nodes."""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil
import pytest
import zmq

from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_engine import LLM, SamplingParams
from tests.engine.server.dry_server import HANG_S, EngineServer, environment, free_port, serve_command, wait_until

FLAGS = ("demo", "--device", "cpu", "--kv-cache-memory", "30MB")
START_S = 240.0
"""Every rank imports torch: on a machine that has little time left that takes long."""
REQUEST = {"model": "demo", "prompt": "def main():", "max_tokens": 30, "temperature": 0}


def _children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


class _Waiting:
    """A client with a long request."""

    def __init__(self, url: str, max_tokens: int = 3000) -> None:
        self.status = 0
        self.text = ""
        self.thread = threading.Thread(target=self._run, args=(url, max_tokens), daemon=True)
        self.thread.start()

    def _run(self, url: str, max_tokens: int) -> None:
        request_body = REQUEST | {"max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=request_body, timeout=60) as response:
                self.status = response.status_code
                for part in response.iter_text():
                    self.text += part
        except httpx.HTTPError as error:
            self.text += repr(error)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_clients_learn_of_the_end_of_a_rank_and_all_is_over(number: signal.Signals) -> None:
    server = EngineServer(*FLAGS, "--tensor-parallel-size", "2", limit_s=START_S)
    try:
        assert server.client.get("/readyz").json()["tensor_parallel_size"] == 2
        labels = server.client.get("/metrics").text
        assert 'all_reduce="gloo"' in labels
        assert 'tensor_parallel_size="2"' in labels
        assert server.client.post("/v1/completions", json=REQUEST).status_code == 200
        (rank,) = _children(server.core_pid)
        client = _Waiting(server.url)
        wait_until(lambda: "data:" in client.text)
        os.kill(rank, number)
        client.thread.join(HANG_S)
        assert "rank 1 of the tensor-parallel group" in client.text
        assert server.wait() == 1
        assert "rank 1 of the tensor-parallel group" in server.log[-1]
        wait_until(lambda: not Path(f"/proc/{rank}").exists())
    finally:
        server.process.kill()


def test_other_ranks_end_the_first_one_when_it_hangs(tmp_path: Path) -> None:
    variables = {"TMPDIR": str(tmp_path)}
    server = EngineServer(*FLAGS, "--tensor-parallel-size", "2", limit_s=START_S, variables=variables)
    try:
        assert list(tmp_path.glob("mini-infer*")) == [], "all are connected: nothing is left, however they end"
        client = _Waiting(server.url)
        wait_until(lambda: "data:" in client.text)
        os.kill(server.core_pid, signal.SIGSTOP)
        client.thread.join(HANG_S)
        assert "the first rank hangs or has ended" in client.text
        assert server.wait() == 1
        assert "the first rank hangs or has ended" in server.log[-1]
    finally:
        server.process.kill()


@contextmanager
def two_nodes(*more: str) -> Iterator[tuple[EngineServer, "subprocess.Popen[str]"]]:
    """A group of a rank on each of two nodes: the leader's server, and the worker. `more` flags are for both."""
    group = ("--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port")
    flags = (*FLAGS, *group, str(free_port()), *more)
    command = serve_command(*flags, "--port", "0", "--node-rank", "1")
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a worker that is killed leaves its files there
        variables = environment() | {"TMPDIR": folder}
        worker = subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)
        leader = EngineServer(*flags, "--node-rank", "0", limit_s=START_S)
        try:
            yield leader, worker
        finally:
            for process in (worker, leader.process):
                process.kill()
                process.wait()


def text_of_one_process() -> str:
    """Returns what the model says to REQUEST without ranks."""
    llm = LLM("demo", device="cpu", kv_cache_memory=30_000_000)
    sampling_params = SamplingParams(temperature=0, max_tokens=30)
    (answer,) = llm.generate(["def main():"], sampling_params, use_tqdm=False)
    return answer.outputs[0].text


def test_two_node_text_equals_one_process_and_the_group_ends_together() -> None:
    group = ("--tensor-parallel-size", "2", "--master-port")
    port, health = str(free_port()), free_port()
    pod = {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "127.0.0.1"}  # as LeaderWorkerSet's controller says it
    command = serve_command(*FLAGS, *group, port, "--port", str(health))
    variables = environment() | pod | {"LWS_WORKER_INDEX": "1"}
    worker = subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)
    leader = EngineServer(*FLAGS, *group, port, variables=pod | {"LWS_WORKER_INDEX": "0"}, limit_s=START_S)
    try:
        for path, status in (("/healthz", 200), ("/readyz?x", 200), ("/v1/models", 404)):
            assert httpx.get(f"http://127.0.0.1:{health}{path}", timeout=60).status_code == status
        text = leader.client.post("/v1/completions", json=REQUEST).json()["choices"][0]["text"]
        assert text == text_of_one_process()
        (rank,) = _children(worker.pid)
        client = _Waiting(leader.url)
        wait_until(lambda: "data:" in client.text)
        os.kill(rank, signal.SIGKILL)
        client.thread.join(HANG_S)
        assert re.search("rank 1 of the tensor-parallel group", client.text)
        assert worker.wait(HANG_S) == 1
        assert leader.wait() == 1
    finally:
        worker.kill()
        leader.process.kill()


def test_a_rank_that_hangs_ends_both_nodes() -> None:
    with two_nodes() as (leader, worker):
        (rank,) = _children(worker.pid)
        client = _Waiting(leader.url)
        wait_until(lambda: "data:" in client.text)
        os.kill(rank, signal.SIGSTOP)
        _, log = worker.communicate(timeout=HANG_S)
        assert (leader.wait(), worker.returncode) == (1, 1)
        assert "this node leaves the group" in log.splitlines()[-1]
        wait_until(lambda: not Path(f"/proc/{rank}").exists())


def test_a_worker_stays_until_its_leader_has_finished_when_it_gets_sigterm() -> None:
    with two_nodes() as (leader, worker):
        client = _Waiting(leader.url, max_tokens=150)
        wait_until(lambda: "data:" in client.text)
        worker.send_signal(signal.SIGTERM)
        time.sleep(0.5)  # LeaderWorkerSet's controller ends the leader of a group whose worker is being deleted
        leader.process.send_signal(signal.SIGTERM)
        client.thread.join(HANG_S)
        assert client.text.rstrip().endswith("data: [DONE]"), client.text[-300:]
        assert leader.process.wait(HANG_S) == 0
        assert worker.wait(HANG_S) == 0


@pytest.fixture(scope="module")
def keyed_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineServer, "subprocess.Popen[str]"]]:
    """Returns a group of two nodes with a peer key, which the last of its tests ends."""
    key = tmp_path_factory.mktemp("keys") / "key"
    key.write_text(PeerSecret.generate().hex())
    with two_nodes("--peer-key-file", str(key)) as nodes:
        yield nodes


def test_ranks_on_other_nodes_prove_membership_when_the_group_has_a_peer_key(
    keyed_nodes: tuple[EngineServer, "subprocess.Popen[str]"],
) -> None:
    leader, worker = keyed_nodes
    with zmq.Context() as context:
        assert leader.client.post("/v1/completions", json=REQUEST).status_code == 200
        connections = psutil.Process(leader.core_pid).net_connections("tcp")
        ports = [found.laddr.port for found in connections if found.status == psutil.CONN_LISTEN]
        assert len(ports) >= 3, "signs of life, steps and control of transfers"
        for port in ports:
            stranger = context.socket(zmq.DEALER)
            monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            stranger.connect(f"tcp://127.0.0.1:{port}")
            assert not monitor.poll(500), "somebody without keys is let in"
            stranger.disable_monitor()
            monitor.close(0)
            stranger.close(0)
        assert leader.client.post("/v1/completions", json=REQUEST).status_code == 200
        assert worker.poll() is None


def test_a_worker_leaves_when_its_leader_is_gone(
    keyed_nodes: tuple[EngineServer, "subprocess.Popen[str]"],
) -> None:
    leader, worker = keyed_nodes
    leader.process.kill()
    _, log = worker.communicate(timeout=HANG_S)
    assert worker.returncode == 1
    assert "first rank hangs or has ended" in log or "Connection" in log


def test_a_worker_without_a_leader_exits_when_it_gets_sigterm() -> None:
    group = ("--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port")
    command = serve_command(*FLAGS, *group, str(free_port()), "--port", "0", "--node-rank", "1")
    worker = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        assert worker.stderr is not None
        assert any("ranks 1 to 1 of the group" in line for line in worker.stderr)
        wait_until(lambda: bool(_children(worker.pid)))
        worker.send_signal(signal.SIGTERM)
        worker.wait(HANG_S)
    finally:
        worker.kill()


def test_no_files_are_left_when_a_server_is_ended_while_loading(tmp_path: Path) -> None:
    command = serve_command(*FLAGS, "--port", "0", "--tensor-parallel-size", "2")
    variables = environment() | {"TMPDIR": str(tmp_path)}
    server = subprocess.Popen(command, env=variables, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: bool(list(tmp_path.glob("mini-infer*/rank-1.json"))))
        server.terminate()
        server.wait(HANG_S)
        assert list(tmp_path.glob("mini-infer*")) == []
    finally:
        server.kill()
