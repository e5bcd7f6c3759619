"""Renders the Job that copies a model onto the volume of its cache, and reads how far it is. Pure.

A Job is made once and never changed: another URI or claim is another Job. Its pods lack the service's label, by which
engines are found.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from mini_infer_contract.launch import HTTP_PORT
from mini_infer_operator.gpus import gpu_resources
from mini_infer_operator.launch import CACHE_FOLDER, Launch, cached_folder, model_source, source_access
from mini_infer_operator.objects.metadata import Manifest, child_metadata
from mini_infer_operator.objects.observed_workloads import pods_of
from mini_infer_operator.objects.pod import MODEL_MOUNT, MODEL_VOLUME, tolerating_gpus, unprivileged
from mini_infer_operator.resource import GROUP, InferenceService, ModelCache, ModelCacheStatus, Reason
from mini_infer_operator.status import PermanentFailure

LABEL_MODEL_CACHE = f"{GROUP}/model-cache"
"""Label of the Job's pods: the service for which they copy."""
JOB_NAME_LABEL = "batch.kubernetes.io/job-name"
LOOK_AGAIN_S = 10.0
"""Seconds between two looks at a copy that goes on."""
_CACHE_MOUNT, _SOURCE_MOUNT = "/cache", "/source"
_USER = 65532
"""The user of the engine's image, who owns what is copied."""
_RETRIES = 6
_OF_THE_TEMPLATE = ("imagePullSecrets", "nodeSelector", "tolerations", "affinity", "runtimeClassName")
"""Fields of the engines' pods that place the copy where engines can reach it."""


def model_cache_job(
    service: InferenceService, launch: Launch, pull_policy: str | None, kept: Iterable[str]
) -> Manifest | None:
    """Returns the Job of a service, run from the image of `launch`; None if the spec asks for no cache on a claim.

    `kept` are names of folders of other models on the claim that are still used; what else is there is deleted.
    """
    model = service.spec.model
    if model.cache is None or model.cache.claim is None:
        return None
    name = model_cache_job_name(service)
    labels = {"app.kubernetes.io/name": "mini-infer-fetch", LABEL_MODEL_CACHE: service.metadata.name}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": child_metadata(service, name, {}),
        "spec": {
            "backoffLimit": _RETRIES,
            "template": {
                "metadata": {"labels": labels},
                "spec": _pod(model.uri, model.cache, launch, pull_policy, kept),
            },
        },
    }


def model_cache_job_name(service: InferenceService) -> str:
    """Returns the name of the Job for a service's model and claim, and the access that it is given to the model."""
    model = service.spec.model
    claim = model.cache.claim if model.cache is not None else ""
    access = source_access(model.cache) if model.cache is not None else {}
    text = f"{model.uri} {claim}" + (f" {json.dumps(access, sort_keys=True)}" if access else "")
    return f"{service.metadata.name}-model-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def models_in_use(
    specs: Iterable[Mapping[str, Any]], workloads: Iterable[Mapping[str, Any]], claim: str
) -> tuple[str, ...]:
    """Returns the folders of models on a claim that specs of services name, or from which engines run.

    Both are of the claim's namespace. Specs may break rules: what is no model is left out.
    """
    used = set()
    for spec in specs:
        model = spec.get("model") or {}
        if (model.get("cache") or {}).get("claim") == claim and isinstance(model.get("uri"), str):
            used.add(cached_folder(model["uri"]).removeprefix(f"{CACHE_FOLDER}/"))
    flag = f"--model={MODEL_MOUNT}/{CACHE_FOLDER}/"
    for workload in workloads:
        containers = pods_of(workload)["template"].get("spec", {}).get("containers", ())
        arguments = [str(argument) for container in containers for argument in container.get("args") or ()]
        used |= {argument.removeprefix(flag) for argument in arguments if argument.startswith(flag)}
    return tuple(sorted(used))


def model_cache_status(
    service: InferenceService,
    job: Mapping[str, Any] | None,
    progress: tuple[int, int | None] | None,
    previous: Mapping[str, Any],
) -> ModelCacheStatus | None:
    """Returns how far the copy is; None if the spec asks for none.

    `progress` are the bytes that the Job's pod has reported, and those of the whole model. `previous` is the stored
    status, whose bytes hold while the pod does not answer.
    """
    cache = service.spec.model.cache
    if cache is None:
        return None
    before = previous.get("modelCache") or {}
    done, total = progress or (before.get("copiedBytes"), before.get("totalBytes"))
    if job is None or not _begun(job):
        return ModelCacheStatus(claim=cache.claim, state="Waiting")
    if is_complete(job):
        return ModelCacheStatus(claim=cache.claim, state="Ready", copied_bytes=total, total_bytes=total, percent=100)
    percent = min(100, 100 * done // total) if done is not None and total else None
    return ModelCacheStatus(
        claim=cache.claim,
        state="Failed" if _condition(job, "Failed") else "Copying",
        copied_bytes=done,
        total_bytes=total,
        percent=percent,
    )


def node_copy_status(
    service: InferenceService, pods: Iterable[Mapping[str, Any]], progress: tuple[int, int | None] | None
) -> ModelCacheStatus | None:
    """Returns how far copies onto nodes are, by the service's pods; None if the spec asks for none.

    `progress` are the bytes that a copying pod has reported, and those of the whole model.
    """
    cache = service.spec.model.cache
    if cache is None or cache.host_path is None:
        return None
    copying, done = copying_pods(pods), any(_has_copied(pod) for pod in pods)
    state: Literal["Waiting", "Copying", "Ready"] = "Copying" if copying else "Ready" if done else "Waiting"
    copied, total = progress if copying and progress is not None else (None, None)
    return ModelCacheStatus(
        host_path=cache.host_path,
        state=state,
        copied_bytes=copied,
        total_bytes=total,
        percent=100 if state == "Ready" else min(100, 100 * copied // total) if copied is not None and total else None,
    )


def copying_pods(pods: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the pods that copy a model onto their node now, or wait for another pod that does."""
    return [pod for pod in pods if "running" in _copy_state(pod)]


def _has_copied(pod: Mapping[str, Any]) -> bool:
    return bool(_copy_state(pod).get("terminated", {}).get("exitCode") == 0)


def _copy_state(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    containers = (pod.get("status") or {}).get("initContainerStatuses") or ()
    return next((c.get("state") or {} for c in containers if c.get("name") == MODEL_VOLUME), {})


def model_cache_failure(job: Mapping[str, Any]) -> PermanentFailure | None:
    """Returns the failure of a Job that Kubernetes has given up; None while it goes on, and once it is complete."""
    failed = _condition(job, "Failed")
    if failed is None:
        return None
    name = job["metadata"]["name"]
    reason = failed.get("message") or failed.get("reason") or "it failed"
    return PermanentFailure(
        Reason.MODEL_CACHE_FAILED,
        f"Job {name} could not copy the model: {reason}. `kubectl logs job/{name}` says why; write another "
        "spec.model.uri, or mend the source and delete the Job, and it is made again",
    )


def is_complete(job: Mapping[str, Any]) -> bool:
    """Returns True if the model was copied and verified."""
    return _condition(job, "Complete") is not None


def _pod(uri: str, cache: ModelCache, launch: Launch, pull_policy: str | None, kept: Iterable[str]) -> dict[str, Any]:
    access = source_access(cache)
    given = {"HOME": "/tmp", "PYTHONUNBUFFERED": "1"}
    theirs = access.get("env", [])
    ours = [{"name": k, "value": v} for k, v in given.items() if k not in {item["name"] for item in theirs}]
    template = launch.template.spec.model_dump(by_alias=True, exclude_none=True) if launch.template.spec else {}
    placement = {field: template[field] for field in _OF_THE_TEMPLATE if field in template}
    if gpu_resources(launch.resources):
        placement["tolerations"] = tolerating_gpus(placement.get("tolerations", []))
    volumes: list[dict[str, Any]] = [
        {"name": "cache", "persistentVolumeClaim": {"claimName": cache.claim}},
        {"name": "tmp", "emptyDir": {}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "cache", "mountPath": _CACHE_MOUNT},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    source = uri
    if (found := model_source(uri) if uri.startswith("pvc://") else None) is not None:
        volumes.append({"name": "source", "persistentVolumeClaim": {"claimName": found.claim, "readOnly": True}})
        mounts.append({"name": "source", "mountPath": _SOURCE_MOUNT, "readOnly": True})
        source = f"{_SOURCE_MOUNT}/{found.claim_path}".rstrip("/")
    folder = cached_folder(uri)
    name = folder.removeprefix(f"{CACHE_FOLDER}/")
    arguments = [source, f"{_CACHE_MOUNT}/{folder}", f"--progress-port={HTTP_PORT}", "--prune"]
    return {
        **placement,
        **({"serviceAccountName": cache.service_account_name} if cache.service_account_name else {}),
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "fsGroup": _USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": "fetch",
                "image": launch.image,
                "command": ["mini-infer", "fetch"],
                "args": arguments + [f"--keep={other}" for other in kept if other != name],
                "env": ours + theirs,
                **({"envFrom": access["envFrom"]} if "envFrom" in access else {}),
                "ports": [{"name": "progress", "containerPort": HTTP_PORT}],
                "volumeMounts": mounts,
                "resources": {"requests": {"cpu": "500m", "memory": "256Mi"}},
                "securityContext": {**unprivileged(), "readOnlyRootFilesystem": True},
                "terminationMessagePolicy": "FallbackToLogsOnError",
                **({"imagePullPolicy": pull_policy} if pull_policy else {}),
            }
        ],
        "volumes": volumes,
    }


def _begun(job: Mapping[str, Any]) -> bool:
    status = job.get("status") or {}
    return bool(status.get("active") or status.get("succeeded") or status.get("failed") or status.get("conditions"))


def _condition(job: Mapping[str, Any], kind: str) -> Mapping[str, Any] | None:
    """Returns the Job's condition of this type if it is True."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    return next((c for c in conditions if c.get("type") == kind and c.get("status") == "True"), None)
