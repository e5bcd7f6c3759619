"""Prefill and decode apart, two ranks, a group over two pods: on real pods, asked through the gateway, losing some."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from mini_infer_contract.metrics import ENGINE_KV_TRANSFER_BYTES
from mini_infer_operator.resource import LABEL_ROLE, LABEL_SERVICE
from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.commands import ROOT, log_line
from tests.e2e.questions import QUESTION, wait_for_answer
from tests.e2e.release import RELEASE, SYSTEM, Release
from tests.support.leader_worker_sets import leader_worker_sets

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
STREAMS = 200
TOKENS = 48
KILL_A_RANK = """
import os, pathlib, signal
def parent(pid): return int((pathlib.Path('/proc') / str(pid) / 'stat').read_text().rsplit(')', 1)[1].split()[1])
pids = sorted(int(p.name) for p in pathlib.Path('/proc').iterdir() if p.name.isdigit() and int(p.name) != os.getpid())
ranks = [p for p in pids if p != 1 and b'python' in (pathlib.Path('/proc') / str(p) / 'cmdline').read_bytes()]
os.kill(max(p for p in ranks if parent(p) != 0), signal.SIGKILL)
"""


@dataclass(frozen=True)
class Example:
    """A service of examples/ in a namespace."""

    cluster: Cluster
    namespace: str
    file: str
    name: str

    def kubectl(self, *arguments: str) -> str:
        return self.cluster.kubectl("-n", self.namespace, *arguments)

    def start(self, replicas: int | None = None) -> None:
        """Apply it and wait until it is ready."""
        begun_s = time.monotonic()
        self.kubectl("apply", "-f", str(ROOT / "examples" / self.file))
        if replicas is None:
            self.ready()
        else:
            self.scale(replicas)
        log_line(f"{self.file} is ready after {time.monotonic() - begun_s:.0f} s")

    def scale(self, replicas: int) -> None:
        """And wait until it is ready."""
        self.kubectl("scale", f"infsvc/{self.name}", f"--replicas={replicas}")
        self.ready()

    def ready(self) -> None:
        self.kubectl("wait", f"infsvc/{self.name}", "--for=condition=Ready", "--timeout=180s")
        wait_until(f"{self.name} settled", self._settled, timeout_s=120)

    def _settled(self) -> bool:
        (service,) = self.cluster.read("InferenceService", self.namespace, self.name)
        status = service.get("status", {})
        conditions = {c["type"]: c["status"] for c in status.get("conditions", ())}
        return bool(
            status.get("observedGeneration") == service["metadata"]["generation"] and conditions.get("Ready") == "True"
        )

    def pods(self, role: str = "") -> dict[str, str]:
        """Name to uid."""
        selector = f"{LABEL_SERVICE}={self.name}" + (f",{LABEL_ROLE}={role}" if role else "")
        found = self.cluster.read("Pod", self.namespace, labels=selector)
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in found}

    def in_pod(self, pod: str, program: str) -> str:
        """What a Python program prints in an engine's container."""
        return self.kubectl("exec", pod, "-c", "engine", "--", "python", "-c", program)

    def lose(self, pod: str) -> None:
        """It is gone without a word."""
        self.kubectl("delete", "pod", pod, "--grace-period=0", "--force")

    def lose_one_of(self, role: str) -> None:
        self.lose(min(self.pods(role)))

    def kill_a_rank(self) -> None:
        """The youngest of the processes in one engine's container that compute."""
        self.in_pod(min(self.pods()), KILL_A_RANK)

    def moved_bytes(self) -> float:
        """Of KV cache, that decode engines have taken from prefill engines."""
        program = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8000/metrics').read().decode())"
        texts = [self.in_pod(pod, program) for pod in self.pods("decode")]
        lines = [line for text in texts for line in text.splitlines() if line.startswith(ENGINE_KV_TRANSFER_BYTES)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_no_request_fails_with_prefill_and_decode_apart(cluster: Cluster, release: Release, namespace: str) -> None:
    pair = Example(cluster, namespace, "disaggregated.yaml", "pair")
    release.wait()
    pair.start()
    conditions = pair.kubectl("get", "infsvc", "pair")
    assert conditions.splitlines()[1].split()[6:8] == ["1/1", "2/2"], conditions
    with cluster.reach(SYSTEM, f"{RELEASE}-gateway") as url:
        wait_for_answer(url, "pair", timeout_s=120)
        wait_until("KV cache from prefill to decode", lambda: pair.moved_bytes() > 0, timeout_s=60, every_s=2)
        asyncio.run(streams(url, "pair", lambda: pair.lose_one_of("prefill")))
        asyncio.run(streams(url, "pair", lambda: pair.lose_one_of("decode")))


def test_no_request_fails_when_a_rank_is_killed(cluster: Cluster, release: Release, namespace: str) -> None:
    tensor = Example(cluster, namespace, "tensor-parallel.yaml", "tensor")
    release.wait()
    tensor.start(replicas=2)
    with cluster.reach(SYSTEM, f"{RELEASE}-gateway") as url:
        wait_for_answer(url, "tensor", timeout_s=120)
        asyncio.run(streams(url, "tensor", tensor.kill_a_rank))


def test_a_two_pod_group_drains_and_restarts_together(cluster: Cluster, release: Release, namespace: str) -> None:
    group = Example(cluster, namespace, "over-nodes.yaml", "group")
    release.wait()
    with (
        leader_worker_sets(Path(cluster.environment["KUBECONFIG"])),
        cluster.reach(SYSTEM, f"{RELEASE}-gateway") as url,
    ):
        group.start()
        wait_for_answer(url, "group", timeout_s=120)
        before = group.pods()
        # What `kubectl drain` of its node does to a worker of the only group: nobody else could go on with its streams.
        asyncio.run(streams(url, "group", lambda: cluster.evict(max(before), namespace), count=150))
        anew(group, before)
        group.scale(2)
        before = group.pods()
        asyncio.run(streams(url, "group", lambda: group.lose(max(before))))
        anew(group, before)
        wait_for_answer(url, "group", timeout_s=120)
        log_line("one of two groups of two pods lost a member, and started anew as a whole")


def anew(group: Example, before: dict[str, str]) -> None:
    """Wait until both pods are others and the service is ready."""
    wait_until("a whole group anew", lambda: len(set(group.pods().values()) - {*before.values()}) == 2, timeout_s=120)
    group.ready()


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
    log_line(f"{model}: {after} of {texts.total()} streams ended after the loss, {sum(wrong.values())} failed")
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
