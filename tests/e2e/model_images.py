"""Models in images: mounted from the node's own images by tag, by digest and with a folder inside; some are missing.

The node has the image already; nothing is pulled.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.commands import log_line
from tests.e2e.model_archives import FOLDER, write_model_archive
from tests.e2e.questions import wait_for_answer

REPOSITORY, TAG = "localhost/mini-infer-demo-model", "e2e"
PART = "model-images"


def load_model_image(cluster: Cluster) -> str:
    """Gives the cluster's nodes the demo model as REPOSITORY:TAG and returns its digest."""
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "model.tar"
        digest = write_model_archive(REPOSITORY, TAG, archive)
        cluster.load(archive)
    return digest


def model_images(cluster: Cluster, gateway_url: str, namespace: str = "default") -> tuple[dict[str, Any], int]:
    """Serves from the image in three ways, and tries what is not there; returns what was seen, and 0.

    Raises:
        AssertionError, TimeoutError: a service did not become what it should.
    """
    digest = load_model_image(cluster)
    tag = f"oci://{REPOSITORY}:{TAG}"
    found: dict[str, Any] = {"digest": digest, "ready_s": {}}
    for name, uri in {
        "image-by-tag": tag,
        "image-by-digest": f"oci://{REPOSITORY}@{digest}",
        "folder-of-image": f"{tag}#{FOLDER}",
    }.items():
        found["ready_s"][name] = serve(cluster, gateway_url, namespace, name, uri)
        is_read_only(cluster, namespace, name)
        cluster.kubectl("delete", "infsvc", name, "-n", namespace)
    found["refused"] = [
        _not_ready(cluster, namespace, "image-missing", "oci://localhost/no-such-model:0", "ImagePullFailed"),
        _not_ready(cluster, namespace, "digest-missing", f"oci://{REPOSITORY}@sha256:{'0' * 64}", "ImagePullFailed"),
        _not_ready(cluster, namespace, "folder-missing", f"{tag}#no/such/folder", "EngineCrashing"),
    ]
    found["named_right_s"] = serve(cluster, gateway_url, namespace, "image-missing", tag)
    cluster.kubectl("delete", "infsvc", "-n", namespace, "-l", f"part={PART}")
    return found, 0


def serve(cluster: Cluster, gateway_url: str, namespace: str, name: str, uri: str) -> float:
    """Applies a service of this model, asks it, and returns the seconds until it was ready."""
    begun_s = time.monotonic()
    _apply(cluster, namespace, name, uri)
    wait_until(f"{name} ready", lambda: _ready_condition(cluster, namespace, name).get("status") == "True", 120, 0.2)
    ready_s = round(time.monotonic() - begun_s, 1)
    wait_for_answer(gateway_url, name, timeout_s=60)
    log_line(f"{name} answers, ready after {ready_s} s: {uri}")
    return ready_s


def is_read_only(cluster: Cluster, namespace: str, name: str) -> None:
    """Tries to write to the model's folder from an engine."""
    (pod, *_) = cluster.read("Pod", namespace, labels=f"serving.mini-infer.io/service={name}")
    write = "import errno\ntry: open('/model/file', 'w')\nexcept OSError as error: print(errno.errorcode[error.errno])"
    command = ("exec", pod["metadata"]["name"], "-n", namespace, "-c", "engine", "--", "python", "-c", write)
    assert cluster.kubectl(*command).strip() == "EROFS"


def _not_ready(cluster: Cluster, namespace: str, name: str, uri: str, reason: str) -> dict[str, Any]:
    """Applies a service whose model is not there, and waits until its Ready condition has this reason, and names it."""
    begun_s = time.monotonic()
    _apply(cluster, namespace, name, uri)

    def said() -> str:
        condition = _ready_condition(cluster, namespace, name)
        return str(condition["message"]) if condition.get("reason") == reason else ""

    message = wait_until(f"{name}: {reason}", said, 60)
    said_after_s = round(time.monotonic() - begun_s, 1)
    missing = uri.partition("#")[2] or uri.removeprefix("oci://")
    assert missing in message, message
    log_line(f"{name}, after {said_after_s} s: {reason}: {message}")
    return {"uri": uri, "reason": reason, "message": message, "after_s": said_after_s}


def _ready_condition(cluster: Cluster, namespace: str, name: str) -> dict[str, Any]:
    (service,) = cluster.read("InferenceService", namespace, name)
    status = service.get("status", {})
    if status.get("observedGeneration") != service["metadata"]["generation"]:
        return {}
    return next((c for c in status.get("conditions", ()) if c["type"] == "Ready"), {})


def _apply(cluster: Cluster, namespace: str, name: str, uri: str) -> None:
    service = {
        "apiVersion": "serving.mini-infer.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name, "namespace": namespace, "labels": {"part": PART}},
        "spec": {
            "model": {"uri": uri, "name": name},
            "unified": {"replicas": 1, "engine": {"kvCacheMemory": "64Mi"}},
        },
    }
    cluster.apply(yaml.safe_dump(service))
