"""Prefill and decode apart, two ranks, a group over two pods: on real pods, asked through the gateway, losing some."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import httpx
import pytest

from mini_infer_contract.metrics import ENGINE_KV_TRANSFER_BYTES
from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.commands import ROOT, say
from tests.e2e.questions import ANSWER, QUESTION
from tests.e2e.test_platform import RELEASE, SYSTEM, USER, install, namespaces  # noqa: F401 - a fixture
from tests.support.leader_worker_sets import CRD, leader_worker_sets

STREAMS = 200
TOKENS = 48
KILL_A_RANK = """
import os, pathlib, signal
def parent(pid): return int((pathlib.Path('/proc') / str(pid) / 'stat').read_text().rsplit(')', 1)[1].split()[1])
pids = sorted(int(p.name) for p in pathlib.Path('/proc').iterdir() if p.name.isdigit() and int(p.name) != os.getpid())
ranks = [p for p in pids if p != 1 and b'python' in (pathlib.Path('/proc') / str(p) / 'cmdline').read_bytes()]
os.kill(max(p for p in ranks if parent(p) != 0), signal.SIGKILL)
"""


@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("namespaces")
def test_roles_and_ranks_answer_and_lose_nothing(cluster: Cluster) -> None:
    install(cluster, **{"gateway.options.maxLocalPrefillTokens": "16"})  # the example's question is to go apart
    for part in ("gateway", "operator"):
        cluster.kubectl("rollout", "status", f"deployment/{RELEASE}-{part}", "-n", SYSTEM, "--timeout=120s")
    with cluster.reach(SYSTEM, f"{RELEASE}-gateway") as url:
        start(cluster, "disaggregated.yaml", "pair")
        told = cluster.kubectl("get", "infsvc", "pair", "-n", USER)
        assert told.splitlines()[1].split()[6:8] == ["1/1", "2/2"], told
        ask(url, "pair")
        assert moved_bytes(cluster) > 0, "no KV cache went from prefill to decode"
        asyncio.run(streams(url, "pair", lambda: lose(cluster, "pair", "prefill")))
        asyncio.run(streams(url, "pair", lambda: lose(cluster, "pair", "decode")))
        stop(cluster, "disaggregated.yaml", "pair")

        start(cluster, "tensor-parallel.yaml", "tensor", replicas=2)
        ask(url, "tensor")
        asyncio.run(streams(url, "tensor", lambda: kill_a_rank(cluster, "tensor")))
        stop(cluster, "tensor-parallel.yaml", "tensor")

        with groups(cluster):
            start(cluster, "over-nodes.yaml", "group")
            ask(url, "group")
            before = uids(cluster, "group")
            asyncio.run(streams(url, "group", lambda: drain_a_worker(cluster, "group"), count=150))
            wait_until("a whole group anew", lambda: len(uids(cluster, "group") - before) == 2, timeout_s=60)
            ready(cluster, "group")
            before = uids(cluster, "group")
            cluster.kubectl("delete", "pod", pods(cluster, "group")[-1], "-n", USER, "--grace-period=0", "--force")
            wait_until("a whole group anew", lambda: len(uids(cluster, "group") - before) == 2, timeout_s=60)
            ready(cluster, "group")
            ask(url, "group")
            say("a group of two pods lost one, started anew as a whole and answers")
            stop(cluster, "over-nodes.yaml", "group")


@contextlib.contextmanager
def groups(cluster: Cluster) -> Iterator[None]:
    """LeaderWorkerSets are served, and a stand-in for their controller makes their pods."""
    cluster.kubectl("apply", "--server-side", "-f", str(CRD))
    operator = "deployment/mini-infer-operator"
    cluster.kubectl("rollout", "restart", operator, "-n", SYSTEM)  # or it would look again within a minute
    cluster.kubectl("rollout", "status", operator, "-n", SYSTEM, "--timeout=90s")
    try:
        with leader_worker_sets(Path(cluster.environment["KUBECONFIG"])):
            yield
    finally:
        cluster.kubectl("delete", "-f", str(CRD), "--ignore-not-found", "--timeout=60s")


def uids(cluster: Cluster, name: str) -> set[str]:
    found = cluster.get("pods", "-n", USER, "-l", f"serving.mini-infer.io/service={name}")
    return {pod["metadata"]["uid"] for pod in found}


def start(cluster: Cluster, example: str, name: str, replicas: int | None = None) -> None:
    """Apply an example and wait until it is ready."""
    begun_s = time.monotonic()
    cluster.kubectl("apply", "-n", USER, "-f", str(ROOT / "examples" / example))
    if replicas is not None:
        cluster.kubectl("scale", f"infsvc/{name}", "-n", USER, f"--replicas={replicas}")
    ready(cluster, name)
    say(f"{example} is ready after {time.monotonic() - begun_s:.0f} s")


def ready(cluster: Cluster, name: str) -> None:
    cluster.kubectl("wait", f"infsvc/{name}", "-n", USER, "--for=condition=Ready", "--timeout=180s")
    wait_until(f"{name} settled", lambda: settled(cluster, name), timeout_s=120)


def settled(cluster: Cluster, name: str) -> bool:
    (service,) = cluster.get("infsvc", name, "-n", USER)
    status = service.get("status", {})
    told = {c["type"]: c["status"] for c in status.get("conditions", ())}
    return bool(status.get("observedGeneration") == service["metadata"]["generation"] and told.get("Ready") == "True")


def stop(cluster: Cluster, example: str, name: str) -> None:
    cluster.kubectl("delete", "-n", USER, "-f", str(ROOT / "examples" / example))
    for pod in pods(cluster, name):  # what is asked for is shown; how an engine drains, other tests tell
        cluster.kubectl("delete", "pod", pod, "-n", USER, "--grace-period=0", "--force", "--ignore-not-found")


def ask(url: str, model: str) -> None:
    """The right answer through the gateway, which may hear of a new engine a moment later than we do."""
    body = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 60}

    def answer() -> str:
        response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        return str(response.json()["choices"][0]["message"]["content"]) if response.status_code == 200 else ""

    text = wait_until(f"an answer of {model}", answer, timeout_s=30)
    assert ANSWER in text, text


def pods(cluster: Cluster, name: str, role: str = "") -> list[str]:
    """Names of a service's pods."""
    selector = f"serving.mini-infer.io/service={name}" + (f",serving.mini-infer.io/role={role}" if role else "")
    found = cluster.get("pods", "-n", USER, "-l", selector)
    return [pod["metadata"]["name"] for pod in found]


def in_pod(cluster: Cluster, pod: str, program: str) -> str:
    """What a Python program prints in an engine's container."""
    return cluster.kubectl("exec", pod, "-n", USER, "-c", "engine", "--", "python", "-c", program)


def moved_bytes(cluster: Cluster) -> float:
    """Of KV cache, that decode engines have taken from prefill engines."""
    program = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8000/metrics').read().decode())"
    texts = [in_pod(cluster, pod, program) for pod in pods(cluster, "pair", "decode")]
    lines = [line for text in texts for line in text.splitlines() if line.startswith(ENGINE_KV_TRANSFER_BYTES)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def lose(cluster: Cluster, name: str, role: str) -> None:
    """One engine of the role is gone without a word."""
    pod = pods(cluster, name, role)[0]
    cluster.kubectl("delete", "pod", pod, "-n", USER, "--grace-period=0", "--force")


def kill_a_rank(cluster: Cluster, name: str) -> None:
    """The youngest of the processes in one engine's container that compute."""
    in_pod(cluster, pods(cluster, name)[0], KILL_A_RANK)


def drain_a_worker(cluster: Cluster, name: str) -> None:
    """What `kubectl drain` of its node does to a worker of the only group: nobody else could go on with its streams."""
    worker = pods(cluster, name)[-1]
    metadata = {"name": worker, "namespace": USER}
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
    cluster.post(f"/api/v1/namespaces/{USER}/pods/{worker}/eviction", json.dumps(eviction))


async def streams(url: str, model: str, disturb: Callable[[], None], count: int = STREAMS) -> None:
    """So many streams of the same greedy text at any time until something is lost: all end, with the same words."""
    connector = aiohttp.TCPConnector(limit=count)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=240)) as session:
        expected = await one_stream(session, url, model)
        texts, is_lost = Counter[str](), asyncio.Event()

        async def client() -> None:
            while not is_lost.is_set():
                texts[await one_stream(session, url, model)] += 1

        clients = [asyncio.create_task(client()) for _ in range(count)]
        await asyncio.sleep(1)
        await asyncio.to_thread(disturb)
        is_lost.set()
        ended = texts.total()
        await asyncio.gather(*clients)
    wrong = {text: number for text, number in texts.items() if text != expected}
    after = texts.total() - ended
    say(f"{model}: {after} of {texts.total()} streams ended after the loss, {sum(wrong.values())} failed")
    assert not wrong, (expected, wrong)


async def one_stream(session: aiohttp.ClientSession, url: str, model: str) -> str:
    """Its text; a failure is told in place of it."""
    body = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": TOKENS, "stream": True}
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                return f"status {response.status}: {(await response.text())[:200]}"
            text, ended = "", False
            async for line in response.content:
                if line.startswith(b"data: "):
                    if line.strip() == b"data: [DONE]":
                        ended = True
                        break
                    event = json.loads(line[6:])
                    if "error" in event:
                        return f"an error in the stream: {event['error']}"
                    text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            return text if ended else f"the stream was cut after {text!r}"
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return f"{type(error).__name__}: {error}"
