"""`make e2e-gpu`: examples/gpu.yaml on a node with GPUs, changed under load, and how soon a pod gives its first token.

With two GPUs also prefill and decode apart, and an engine of two ranks, asked through the gateway.

E2E_NODE       a program that makes the node: PROGRAM up DIR --gpus G, and exec, load, down
E2E_NODE_ADDRESS the node's address (default: 10.77.0.1), or auto: its InternalIP, as with scripts/kind_gpu.sh
E2E_GPUS       what is given to --gpus: real (default), or a number where GPUs are only counted
E2E_GPU_TARGET the Dockerfile's target: engine-cuda (default), or engine-cpu where GPUs are only counted
E2E_GPU_BUILD  a program that builds the engine's image: tests/e2e/host_image.sh with its HOST_IMAGE and HOST_PACKAGES,
               where no registry is reached and the node lends engines its own Python; else E2E_BUILD
E2E_GPU_MODELS shapes of benchmarks/common/models.py to start with random weights: qwen3-0.6b,qwen2.5-7b; empty: none
E2E_GPU_KV_CACHE=8Gi   of each engine, where the device plugin lends one GPU to several pods (time slices)
"""

import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.common.models import model_folder
from mini_infer_contract.metrics import ENGINE_KV_TRANSFER_BYTES
from tests.e2e.cluster import wait_until
from tests.e2e.commands import ROOT, log_line
from tests.e2e.gpu_node import GpuNode
from tests.e2e.questions import ANSWER, QUESTION

pytestmark = [pytest.mark.e2e, pytest.mark.gpu, pytest.mark.timeout(1800)]
MODELS = [name for name in os.environ.get("E2E_GPU_MODELS", "qwen3-0.6b,qwen2.5-7b").split(",") if name]
READY_LIMIT_S = 600.0
PODS = ("pods", "-l", "serving.mini-infer.io/service=demo-gpu")


@pytest.fixture(scope="module")
def node() -> Iterator[GpuNode]:
    program = os.environ.get("E2E_NODE")
    if not program:
        pytest.skip("no node with GPUs: E2E_NODE must name a program that makes one")
    gpus = os.environ.get("E2E_GPUS", "real")
    if gpus == "real" and not Path("/dev/nvidia0").exists():
        pytest.skip("this machine has no NVIDIA GPU: E2E_GPUS=2 E2E_GPU_TARGET=engine-cpu only counts them")
    with tempfile.TemporaryDirectory(prefix="mini-infer-gpu-") as folder:
        node = GpuNode(program, Path(folder), gpus)
        try:
            log_line(f"the node has {node.allocatable()} GPUs")
            node.load_engine()
            with node.control_plane():
                try:
                    yield node
                except BaseException:
                    node.explain("default")
                    raise
        finally:
            node.down()


def apply(node: GpuNode, service: dict[str, Any]) -> None:
    file = node.models / "service.yaml"
    file.write_text(yaml.safe_dump(service))
    node.kubectl("apply", "-f", str(file))


def ready(node: GpuNode, name: str, replicas: int = 1) -> None:
    def is_ready() -> bool:
        (service,) = node.get("infsvc", name)
        status = service.get("status", {})
        conditions = {c["type"]: c for c in status.get("conditions", ())}
        settled = status.get("observedGeneration") == service["metadata"]["generation"]
        return settled and conditions["Ready"]["status"] == "True" and status["replicas"] == replicas

    try:
        wait_until(f"{name} to be ready", is_ready, timeout_s=READY_LIMIT_S)
    except TimeoutError:
        node.explain("default")
        raise


def first_token_s(node: GpuNode, model: str) -> float:
    """From now until the gateway has a first token for a model whose engine may still start."""
    started = time.monotonic()
    body = {"model": model, "prompt": "Once", "max_tokens": 1, "temperature": 0}

    def answered() -> bool:
        try:
            return httpx.post(f"{node.url}/v1/completions", json=body, timeout=30).status_code == 200
        except httpx.TransportError:
            return False

    wait_until("a first token", answered, timeout_s=READY_LIMIT_S, every_s=0.05)
    return time.monotonic() - started


class Load:
    """Completions one after another from a few threads, without retries, until `close`: shapes have no template."""

    def __init__(self, node: GpuNode, threads: int = 4) -> None:
        self.answers: list[int] = []
        self._url, self._ended = node.url, threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        body = {"model": "demo-gpu", "prompt": QUESTION[-1]["content"], "max_tokens": 16}
        with httpx.Client(timeout=60) as client:
            while not self._ended.is_set():
                try:
                    self.answers.append(client.post(f"{self._url}/v1/completions", json=body).status_code)
                except httpx.TransportError:
                    self.answers.append(0)
                time.sleep(0.02)

    def close(self) -> list[int]:
        self._ended.set()
        for thread in self._threads:
            thread.join(60)
        return self.answers


def test_the_gpu_example_answers_and_fails_no_request_when_changed(node: GpuNode) -> None:
    apply(node, node.service("gpu.yaml"))
    cold_s = first_token_s(node, "demo-gpu")
    log_line(f"apply to first token, cold: {cold_s:.1f} s")
    ready(node, "demo-gpu")
    (pod,) = node.get(*PODS)
    spec = pod["spec"]["containers"][0]
    assert spec["image"] == "localhost/mini-infer-engine-cuda:e2e"
    assert {mount["mountPath"]: mount["name"] for mount in spec["volumeMounts"]}["/dev/shm"] == "mini-infer-shm"
    answer = httpx.post(
        f"{node.url}/v1/chat/completions",
        json={"model": "demo-gpu", "messages": QUESTION, "max_tokens": 60, "temperature": 0},
        timeout=60,
    ).json()
    assert ANSWER in answer["choices"][0]["message"]["content"]

    node.kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=1")
    wait_until("the pod to be another", lambda: uids(node) and pod["metadata"]["uid"] not in uids(node), timeout_s=60)
    log_line(f"new pod to first token, warm: {first_token_s(node, 'demo-gpu'):.1f} s")
    ready(node, "demo-gpu")
    changes_lose_nothing(node, node.service("gpu.yaml", engine={"gpuMemoryUtilization": 0.8, "maxNumSeqs": 32}))


def changes_lose_nothing(node: GpuNode, edited: dict[str, Any]) -> None:
    """The service becomes `edited`, gets a second engine and goes back to one, under load."""
    if node.allocatable() < 2:
        log_line("one GPU: no engine can take over from another, so nothing is changed under load")
        return
    load = Load(node)
    apply(node, edited)
    ready(node, "demo-gpu")
    node.kubectl("scale", "infsvc/demo-gpu", "--replicas=2")
    ready(node, "demo-gpu", replicas=2)
    node.kubectl("scale", "infsvc/demo-gpu", "--replicas=1")
    ready(node, "demo-gpu", replicas=1)
    answers = load.close()
    failed = [status for status in answers if status != 200]
    log_line(f"an edit, 2 engines, 1 again: {len(failed)} of {len(answers)} requests failed")
    assert len(answers) >= 20
    assert failed == []


def test_kernels_of_the_image_are_not_compiled_again(node: GpuNode) -> None:
    """What scripts/prebuild_kernels.sh puts into an image, here in a folder: the cache of the test before."""
    clear(node)
    variables = {
        "TRITON_CACHE_DIR": "/tmp/triton",
        "TRITON_CACHE_MANAGER": "mini_infer_engine.kernels.prebuilt_kernels:PrebuiltKernels",
        "MINI_INFER_PREBUILT_KERNELS": "/cache/triton",
    }
    service = node.service("gpu.yaml")
    container = service["spec"]["unified"]["template"]["container"]
    container["env"] = [item for item in container["env"] if item["name"] not in variables]
    container["env"] += [{"name": name, "value": value} for name, value in variables.items()]
    apply(node, service)
    took_s = first_token_s(node, "demo-gpu")
    (pod,) = node.get(*PODS)
    find = ("python3", "-c", "import glob; print(len(glob.glob('/tmp/triton/*/*.cubin')))")
    compiled = int(node.kubectl("exec", pod["metadata"]["name"], "-c", "engine", "--", *find))
    prebuilt = len(list(node.cache.glob("triton/*/*.cubin")))
    log_line(f"apply to first token with {prebuilt} prebuilt kernels: {took_s:.1f} s, {compiled} compiled")
    # One or two may be for a number of pages that another pod had not: Triton compiles for multiples of 16 apart.
    assert compiled <= prebuilt // 10
    assert prebuilt or os.environ.get("E2E_GPU_TARGET") == "engine-cpu"


def uids(node: GpuNode) -> set[str]:
    return {pod["metadata"]["uid"] for pod in node.get(*PODS)}


@pytest.mark.parametrize("model", MODELS)
def test_a_model_shape_starts_cold_and_warm_and_fails_no_request_when_changed(node: GpuNode, model: str) -> None:
    clear(node)
    make_shape(node, model)
    engine = {"maxModelLen": 4096, "gpuMemoryUtilization": 0.8}
    apply(node, of_model(node.service("gpu.yaml", engine=engine), model))
    cold_s = first_token_s(node, "demo-gpu")
    (pod,) = node.get(*PODS)
    node.kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=1")
    wait_until("the pod to be another", lambda: uids(node) and pod["metadata"]["uid"] not in uids(node), timeout_s=60)
    warm_s = first_token_s(node, "demo-gpu")
    log_line(json.dumps({"model": model, "apply_to_first_token_s": round(cold_s, 1), "new_pod_s": round(warm_s, 1)}))
    ready(node, "demo-gpu")
    changes_lose_nothing(node, of_model(node.service("gpu.yaml", engine={**engine, "maxNumSeqs": 32}), model))


def clear(node: GpuNode) -> None:
    """No service, and no pod of one."""
    node.kubectl("delete", "infsvc", "--all", "--wait=true")
    for pod in node.get("pods"):  # nobody asks them any more
        node.kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=1", "--ignore-not-found", "--wait=false")
    wait_until("all engines to be gone", lambda: not node.get("pods"), timeout_s=120)


def make_shape(node: GpuNode, model: str) -> None:
    """A folder for engines that make up its weights."""
    folder = Path(model_folder(model, node.models))
    assets = ROOT / "engine/mini_infer_engine/assets/demo"
    for name in ("tokenizer.json", "tokenizer_config.json"):  # any will do: weights are random
        shutil.copy(assets / name, folder / name)


def of_model(service: dict[str, Any], model: str) -> dict[str, Any]:
    """The same service with another model; of a shape the weights are made up."""
    if model != "demo":
        service["spec"]["model"] = {"uri": f"file:///models/{model}"}
        for role in {"unified", "prefill", "decode"} & service["spec"].keys():
            service["spec"][role]["engine"] = {**service["spec"][role]["engine"], "loadFormat": "dummy"}
    return service


def figures(node: GpuNode, name: str, words: int = 900, requests: int = 8) -> dict[str, float]:
    """Of streams one after another, each with a prompt that no cache knows: first tokens, and gaps between tokens."""
    first_s, gaps_s, tokens = list[float](), list[float](), 0
    with httpx.Client(timeout=120) as client:
        for number in range(requests):
            prompt = " ".join(f"{number}-{word}" for word in range(words // 3))
            body = {"model": name, "prompt": prompt, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
            begun_s, last_s = time.monotonic(), 0.0
            with client.stream("POST", f"{node.url}/v1/completions", json={**body, "stream": True}) as response:
                assert response.status_code == 200, response.read()
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        now_s = time.monotonic()
                        if last_s:
                            gaps_s.append(now_s - last_s)
                        else:
                            first_s.append(now_s - begun_s)
                        last_s, tokens = now_s, tokens + 1
    assert tokens > requests
    return {
        "ttft_p50_ms": round(1000 * statistics.median(first_s), 1),
        "gap_p50_ms": round(1000 * statistics.median(gaps_s), 2),
        "events": tokens,
    }


def send_request(node: GpuNode, name: str) -> None:
    """What the demo model must say."""
    body = {"model": name, "messages": QUESTION, "max_tokens": 60, "temperature": 0}
    answer = httpx.post(f"{node.url}/v1/chat/completions", json=body, timeout=60).json()
    assert ANSWER in answer["choices"][0]["message"]["content"], answer


def engine_metric(node: GpuNode, service: str, role: str, name: str) -> float:
    """The sum of a counter over a role's engines."""
    program = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8000/metrics').read().decode())"
    selector = f"serving.mini-infer.io/service={service},serving.mini-infer.io/role={role}"
    total = 0.0
    for pod in node.get("pods", "-l", selector):
        text = node.kubectl("exec", pod["metadata"]["name"], "-c", "engine", "--", "python3", "-c", program)
        total += sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))
    return total


TWO = pytest.mark.parametrize("model", ["demo", *MODELS[-1:]])


def needs_two(node: GpuNode) -> None:
    if node.allocatable() < 2:
        pytest.skip("needs two GPUs")


@TWO
def test_prefill_and_decode_run_on_a_gpu_each(node: GpuNode, model: str) -> None:
    needs_two(node)
    clear(node)
    if model != "demo":
        make_shape(node, model)
    engine = {"gpuMemoryUtilization": 0.8, "maxModelLen": 4096}
    service = node.service("disaggregated.yaml", engine=engine, resources={"limits": {"nvidia.com/gpu": 1}}, replicas=1)
    apply(node, of_model(service, model))
    cold_s = first_token_s(node, "pair")
    ready(node, "pair", replicas=2)
    if model == "demo":
        send_request(node, "pair")
    conditions = figures(node, "pair")
    moved = engine_metric(node, "pair", "decode", ENGINE_KV_TRANSFER_BYTES)
    log_line(
        json.dumps(
            {"roles": "prefill 1, decode 1", "model": model, "first_s": round(cold_s, 1), **conditions, "bytes": moved}
        )
    )
    if model != "demo":  # a prompt of the demo model is computed sooner than it is sent anywhere
        assert moved > 0


@TWO
def test_a_tensor_parallel_engine_runs_on_two_gpus(node: GpuNode, model: str) -> None:
    needs_two(node)
    clear(node)
    if model != "demo":
        make_shape(node, model)
    engine = {"gpuMemoryUtilization": 0.8, "maxModelLen": 4096}
    service = node.service("tensor-parallel.yaml", engine=engine)
    apply(node, of_model(service, model))
    cold_s = first_token_s(node, "tensor")
    ready(node, "tensor")
    (pod,) = node.get("pods", "-l", "serving.mini-infer.io/service=tensor")
    assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    if model == "demo":
        send_request(node, "tensor")
    log_line(json.dumps({"tensor": 2, "model": model, "first_s": round(cold_s, 1), **figures(node, "tensor")}))
