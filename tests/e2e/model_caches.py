"""Models on the nodes: a claim that a Job fills, and a folder of the node that pods fill; served, shared and collected.

The source is a web server in the cluster that sends the demo model slowly enough for its progress to be seen.
"""

import json
import time
from typing import Any

import yaml

from mini_infer_operator.launch import cached_folder
from tests.e2e.cluster import Cluster, NodeCluster, wait_until
from tests.e2e.commands import log_line
from tests.e2e.model_images import is_read_only
from tests.e2e.questions import wait_for_answer
from tests.e2e.soak import engine_image

NAMESPACE, CLAIM, SOURCE = "default", "weights", "model-source"
BYTES_PER_S = 700_000
SERVE = f"""
import http.server, json, time
from pathlib import Path
import mini_infer_engine

class Handler(http.server.SimpleHTTPRequestHandler):
    def translate_path(self, path):  # every folder has the same model; one of them lies about it
        return str(Path(mini_infer_engine.__file__).parent / "assets/demo" / path.rsplit("/", 1)[1])

    def do_GET(self):
        if not self.path.endswith("/mini-infer-manifest.json") or "/wrong/" not in self.path:
            return super().do_GET()
        folder = Path(mini_infer_engine.__file__).parent / "assets/demo"
        files = {{f.name: {{"size": f.stat().st_size, "sha256": "0" * 64}} for f in folder.iterdir() if f.is_file()}}
        body = json.dumps({{"source": "elsewhere", "files": files}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def copyfile(self, source, outputfile):
        while chunk := source.read({BYTES_PER_S // 10}):
            outputfile.write(chunk)
            time.sleep(0.1)

http.server.ThreadingHTTPServer(("", 8080), Handler).serve_forever()
"""


def model_caches(cluster: Cluster, gateway_url: str) -> tuple[dict[str, Any], int]:
    """Goes through the life of a cache on a claim, and of one on the node; returns what was seen, and 0.

    Raises:
        AssertionError, TimeoutError: a step did not do what it should.
    """
    source = _source()
    cluster.apply(yaml.safe_dump_all(source))
    wait_until("the models' source", lambda: "True" in _ready_conditions(cluster, SOURCE), 120)
    cluster.make_claim(NAMESPACE, CLAIM)
    claim = {"claim": CLAIM}
    found = {"claim": _filled_once(cluster, gateway_url, "cached", claim)}
    found["shared"] = _filled_once(cluster, gateway_url, "cached-too", claim, of="cached")
    is_read_only(cluster, NAMESPACE, "cached-too")
    log_line("a second service shares the folder, and cannot write to it")
    found["wrong"] = _refused(cluster, claim)
    folders = _collected(cluster, gateway_url, claim)
    found["collected"] = {"folders": folders}
    if isinstance(cluster, NodeCluster):
        on_node = {"hostPath": str(cluster.make_folder("models"))}
        found["node"] = _filled_once(cluster, gateway_url, "cached-on-node", on_node, replicas=2)
    cluster.kubectl("delete", "infsvc", "-n", NAMESPACE, "-l", "part=model-caches")
    cluster.kubectl("delete", "pod,service", SOURCE, "-n", NAMESPACE, "--grace-period=0", "--force")
    return found, 0


def _filled_once(
    cluster: Cluster, gateway_url: str, name: str, cache: dict[str, Any], of: str = "", replicas: int = 1
) -> dict[str, Any]:
    """Applies a service, notes each state of its cache until it is ready, and asks it. `of` is another model's."""
    begun_s, seen = time.monotonic(), list[dict[str, Any]]()
    cluster.apply(yaml.safe_dump(_service(name, of or name, cache, replicas)))

    def is_ready() -> bool:
        (service,) = cluster.read("InferenceService", NAMESPACE, name)
        status = service.get("status", {})
        state = {**status.get("modelCache", {}), "after_s": round(time.monotonic() - begun_s, 1)}
        if not seen or {**seen[-1], "after_s": 0} != {**state, "after_s": 0}:
            seen.append(state)
        conditions = {c["type"]: c["status"] for c in status.get("conditions", ())}
        return conditions.get("Ready") == "True"

    wait_until(f"{name} ready", is_ready, 240, every_s=0.2)
    ready_s = round(time.monotonic() - begun_s, 1)
    wait_for_answer(gateway_url, name, timeout_s=60)
    states = [state.get("state") for state in seen]
    assert states[-1] == "Ready", seen
    if not of:
        assert "Copying" in states, seen
        assert any(0 < state.get("percent", 0) < 100 for state in seen), f"no progress was seen: {seen}"
    log_line(f"{name} answers after {ready_s} s; its cache was {seen}")
    return {"ready_s": ready_s, "states": seen}


def _refused(cluster: Cluster, cache: dict[str, Any]) -> dict[str, Any]:
    """Applies a service whose source's manifest has other hashes than its files: no engine starts from it."""
    name = "cached-wrong"
    cluster.apply(yaml.safe_dump(_service(name, "wrong", cache, 1)))

    def said() -> str:
        pods = cluster.read("Pod", NAMESPACE, labels=f"serving.mini-infer.io/model-cache={name}")
        states = [status["state"] for pod in pods for status in pod["status"].get("containerStatuses", ())]
        return next((state["terminated"].get("message", "-") for state in states if "terminated" in state), "")

    message = wait_until("a copy that is refused", said, 120)
    assert "sha" in message.lower(), message
    assert cluster.read("Pod", NAMESPACE, labels=f"serving.mini-infer.io/service={name}") == []
    cluster.kubectl("delete", "infsvc", name, "-n", NAMESPACE)
    log_line(f"a model with other hashes starts no engine: {message.strip()}")
    return {"message": message.strip()}


def _collected(cluster: Cluster, gateway_url: str, cache: dict[str, Any]) -> list[str]:
    """Deletes the services of one model and copies another: returns the folders, of which the first one's is gone."""
    cluster.kubectl("delete", "infsvc", "cached", "cached-too", "-n", NAMESPACE)
    wait_until(
        "the engines of the first model to end",
        lambda: not cluster.read("Pod", NAMESPACE, labels="serving.mini-infer.io/service in (cached, cached-too)"),
        120,
    )
    _filled_once(cluster, gateway_url, "cached-next", cache)
    (pod, *_) = cluster.read("Pod", NAMESPACE, labels="serving.mini-infer.io/service=cached-next")
    listed = "import json, os; print(json.dumps(os.listdir('/model/mini-infer-models')))"
    listed = listed.replace("mini-infer-models", cached_folder("").partition("/")[0])
    command = ("exec", pod["metadata"]["name"], "-n", NAMESPACE, "-c", "engine", "--", "python", "-c", listed)
    folders: list[str] = json.loads(cluster.kubectl(*command))
    assert cached_folder(_uri("cached-next")).partition("/")[2] in folders, folders
    assert cached_folder(_uri("cached")).partition("/")[2] not in folders, folders
    log_line(f"the model that nobody uses is gone, folders: {folders}")
    return folders


def _uri(folder: str) -> str:
    return f"http://{SOURCE}.{NAMESPACE}.svc:8080/{folder}"


def _service(name: str, folder: str, cache: dict[str, Any], replicas: int) -> dict[str, Any]:
    return {
        "apiVersion": "serving.mini-infer.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"part": "model-caches"}},
        "spec": {
            "model": {"uri": _uri(folder), "name": name, "cache": cache},
            "unified": {"replicas": replicas, "engine": {"kvCacheMemory": "64Mi"}},
        },
    }


def _source() -> list[dict[str, Any]]:
    """Returns the web server's pod and Service."""
    metadata = {"name": SOURCE, "namespace": NAMESPACE, "labels": {"app": SOURCE}}
    container = {
        "name": "source",
        "image": engine_image(),
        "command": ["python", "-c", SERVE],
        "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1},
    }
    return [
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"selector": {"app": SOURCE}, "ports": [{"port": 8080}]},
        },
    ]


def _ready_conditions(cluster: Cluster, pod: str) -> list[str]:
    (found,) = cluster.read("Pod", NAMESPACE, pod)
    return [c["status"] for c in found["status"].get("conditions", ()) if c["type"] == "Ready"]
