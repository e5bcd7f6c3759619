"""The Job that copies a model, which folders it keeps, and how far it is."""

from typing import Any

import pytest

from mini_infer_operator.launch import cached_folder, launch_of, service_revision
from mini_infer_operator.objects.model_cache import (
    model_cache_failure,
    model_cache_job,
    model_cache_job_name,
    model_cache_status,
    models_in_use,
    node_copy_status,
)
from mini_infer_operator.objects.pod import frozen_pods
from mini_infer_operator.parse import parse_service
from mini_infer_operator.pod_security import PodSecurity
from mini_infer_operator.resource import InferenceService
from tests.support.services import changed

URI = "https://models.example.org/qwen3/8b"
FOLDER = cached_folder(URI)


def service_of(
    uri: str = URI, claim: str | None = "weights", cache: dict[str, Any] | None = None, **unified: Any
) -> InferenceService:
    fields = {name: value for name, value in {"claim": claim, **(cache or {})}.items() if value is not None}
    model = {"uri": uri, "cache": fields or None}
    return parse_service(changed({"metadata": {"uid": "u"}, "spec": {"model": model, "unified": unified}}))


def job_of(service: InferenceService, *kept: str) -> dict[str, Any]:
    job = model_cache_job(service, launch_of(service, "unified", "engine:1"), "IfNotPresent", kept)
    assert job is not None
    return job


def test_the_job_copies_the_uri_into_its_folder_when_a_cache_is_asked_for() -> None:
    job = job_of(service_of(), "0" * 16, FOLDER.removeprefix("mini-infer/"))
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["args"] == [URI, f"/cache/{FOLDER}", "--progress-port=8000", "--prune", f"--keep={'0' * 16}"]
    assert container["image"] == "engine:1"
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "weights"}
    assert "readOnly" not in container["volumeMounts"][0]
    assert job["metadata"]["ownerReferences"][0]["uid"] == "u"
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert "serving.mini-infer.io/service" not in labels, "its pods would count as engines"


def test_the_copy_has_the_variables_and_the_identity_that_the_cache_gives() -> None:
    plain = service_of("s3://models/qwen3/8b")
    access = {
        "env": [{"name": "AWS_REGION", "value": "eu-west-1"}, {"name": "HOME", "value": "/elsewhere"}],
        "envFrom": [{"secretRef": {"name": "hub-token"}}],
        "serviceAccountName": "reader",
    }
    service = service_of("s3://models/qwen3/8b", cache=access)
    pod = job_of(service)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"][0] == "s3://models/qwen3/8b"
    assert container["env"] == [{"name": "PYTHONUNBUFFERED", "value": "1"}, *access["env"]]
    assert container["envFrom"] == access["envFrom"]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("reader", False)
    assert "serviceAccountName" not in job_of(plain)["spec"]["template"]["spec"]
    # Credentials are no part of engines: a new key is another Job, and restarts none.
    assert service_revision(service, "engine:1") == service_revision(plain, "engine:1")
    assert model_cache_job_name(service) != model_cache_job_name(plain)


def test_the_credentials_of_a_copy_are_limited_as_those_of_engines_are() -> None:
    service = service_of(
        "s3://models/x", cache={"envFrom": [{"secretRef": {"name": "db"}}], "serviceAccountName": "root"}
    )
    failure = PodSecurity().failure(service, ())
    assert failure is not None
    assert "spec.model.cache.envFrom" in failure.message
    assert "--allow-secrets=db" in failure.message
    assert "--allow-service-accounts=root" in failure.message
    assert PodSecurity().failure(service, (), copies=False) is None
    assert PodSecurity(secrets=("db",), service_accounts=("root",)).failure(service, ("unified",)) is None


def test_the_source_is_mounted_read_only_when_it_is_another_claim() -> None:
    pod = job_of(service_of("pvc://archive/qwen3/8b"))["spec"]["template"]["spec"]
    assert pod["containers"][0]["args"][0] == "/source/qwen3/8b"
    assert {"name": "source", "persistentVolumeClaim": {"claimName": "archive", "readOnly": True}} in pod["volumes"]
    assert pod["containers"][0]["volumeMounts"][-1]["readOnly"] is True


def test_the_job_runs_where_engines_run_when_the_template_places_them() -> None:
    placement = {"nodeSelector": {"zone": "a"}, "imagePullSecrets": [{"name": "registry"}]}
    service = service_of(template={"spec": placement}, resources={"limits": {"nvidia.com/gpu": 1}})
    pod = job_of(service)["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"zone": "a"}
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert "limits" not in pod["containers"][0]["resources"], "a copy needs no GPU"


def test_there_is_no_job_when_no_cache_is_asked_for() -> None:
    service = service_of("demo", None)
    assert model_cache_job(service, launch_of(service, "unified", "engine:1"), None, ()) is None
    assert model_cache_status(service, None, None, {}) is None


def test_the_job_has_another_name_when_uri_or_claim_is_another() -> None:
    services = (service_of(), service_of(f"{URI}-fp8"), service_of(claim="others"))
    assert len({model_cache_job_name(service) for service in services}) == 3
    assert all(len(model_cache_job_name(service)) <= 63 for service in services)


def test_engines_read_the_copy_when_a_cache_is_asked_for() -> None:
    source = launch_of(service_of(), "unified", "engine:1").source
    assert (source.claim, source.claim_path, source.copied_from) == ("weights", FOLDER, URI)


def test_models_of_specs_and_of_running_engines_are_kept_when_others_are_deleted() -> None:
    specs: list[dict[str, Any]] = [
        {"model": {"uri": URI, "cache": {"claim": "weights"}}},
        {"model": {"uri": "https://elsewhere/x", "cache": {"claim": "others"}}},
        {"model": {"uri": "demo"}},
        {"model": None},
    ]
    arguments = [f"--model=/model/mini-infer/{'a' * 16}", "--port=8000"]
    workload = {"spec": {"template": {"spec": {"containers": [{"name": "engine", "args": arguments}, {"name": "x"}]}}}}
    kept = models_in_use(specs, [workload, {"spec": {}}], "weights")
    assert kept == tuple(sorted([FOLDER.removeprefix("mini-infer/"), "a" * 16]))


COMPLETE = {"conditions": [{"type": "Complete", "status": "True"}], "succeeded": 1}
FAILED = {
    "conditions": [{"type": "Failed", "status": "True", "message": "Job has reached the specified backoff limit"}],
    "failed": 7,
}


@pytest.mark.parametrize(
    ("job", "progress", "previous", "expected"),
    [
        (None, None, {}, ("Waiting", None, None, None)),
        ({}, None, {}, ("Waiting", None, None, None)),
        ({"active": 1}, None, {}, ("Copying", None, None, None)),
        ({"active": 1}, (50, 200), {}, ("Copying", 50, 200, 25)),
        ({"active": 1}, (199, 200), {}, ("Copying", 199, 200, 99)),
        ({"active": 1}, (50, None), {}, ("Copying", 50, None, None)),
        ({"active": 1}, (300, 200), {}, ("Copying", 300, 200, 100)),
        ({"active": 1}, None, {"copiedBytes": 50, "totalBytes": 200}, ("Copying", 50, 200, 25)),
        (COMPLETE, None, {"copiedBytes": 50, "totalBytes": 200}, ("Ready", 200, 200, 100)),
        (COMPLETE, None, {}, ("Ready", None, None, 100)),
        (FAILED, None, {"copiedBytes": 50, "totalBytes": 200}, ("Failed", 50, 200, 25)),
    ],
)
def test_bytes_and_per_cent_are_those_of_the_pod_when_it_reports_them(
    job: dict[str, Any] | None,
    progress: tuple[int, int | None] | None,
    previous: dict[str, int],
    expected: tuple[str, int | None, int | None, int | None],
) -> None:
    live = None if job is None else {"metadata": {"name": "j"}, "status": job}
    status = model_cache_status(service_of(), live, progress, {"modelCache": previous})
    assert status is not None
    assert (status.state, status.copied_bytes, status.total_bytes, status.percent) == expected
    assert status.claim == "weights"


def test_the_failure_says_where_the_reason_is_when_the_job_was_given_up() -> None:
    failure = model_cache_failure({"metadata": {"name": "demo-model-1"}, "status": FAILED})
    assert failure is not None
    assert failure.reason == "ModelCacheFailed"
    assert "backoff limit" in failure.message
    assert "kubectl logs job/demo-model-1" in failure.message
    assert model_cache_failure({"metadata": {"name": "j"}, "status": COMPLETE}) is None
    assert model_cache_failure({"metadata": {"name": "j"}}) is None


def node_service(uri: str = URI, **cache: Any) -> InferenceService:
    return service_of(uri, cache={"claim": None, "hostPath": "/var/lib/models", **cache})


def pod_spec(service: InferenceService) -> dict[str, Any]:
    launch = launch_of(service, "unified", "engine:1")
    template = frozen_pods(service, "unified", "r", launch, "IfNotPresent")["template"]
    return dict(template["spec"])


def test_each_pod_copies_when_the_cache_is_a_folder_of_the_node() -> None:
    variables = [{"name": "AWS_REGION", "value": "eu-west-1"}]
    service = node_service("s3://models/qwen3", env=variables, envFrom=[{"secretRef": {"name": "hub-token"}}])
    assert model_cache_job(service, launch_of(service, "unified", "engine:1"), None, ()) is None
    spec, folder = pod_spec(service), cached_folder("s3://models/qwen3")
    (copy,), (engine,) = spec["initContainers"], spec["containers"]
    assert copy["args"] == ["s3://models/qwen3", f"/model/{folder}", "--progress-port=8000", "--make-room"]
    assert copy["env"][1:] == variables
    assert copy["envFrom"] == [{"secretRef": {"name": "hub-token"}}]
    assert "envFrom" not in engine
    assert {"name": "mini-infer-model", "hostPath": {"path": "/var/lib/models", "type": "Directory"}} in spec["volumes"]
    mounts = {mount["name"]: mount.get("readOnly", False) for mount in copy["volumeMounts"]}
    assert mounts == {"mini-infer-tmp": False, "mini-infer-model": False}
    assert {"name": "mini-infer-model", "mountPath": "/model", "readOnly": True} in engine["volumeMounts"]
    assert f"--model=/model/{folder}" in engine["args"]
    # The variables are in engines' pods: other ones are another revision.
    other = node_service("s3://models/qwen3", env=[{"name": "AWS_REGION", "value": "us-east-1"}])
    assert service_revision(service, "engine:1") != service_revision(other, "engine:1")


def test_the_source_is_mounted_read_only_when_a_pod_copies_a_claim_onto_its_node() -> None:
    spec = pod_spec(node_service("pvc://archive/qwen3/8b"))
    assert spec["initContainers"][0]["args"][0] == "/source/qwen3/8b"
    volume = {"name": "mini-infer-source", "persistentVolumeClaim": {"claimName": "archive", "readOnly": True}}
    assert volume in spec["volumes"]


def test_a_folder_of_the_node_needs_the_privileged_profile() -> None:
    failure = PodSecurity().failure(node_service(), ("unified",))
    assert failure is not None
    assert "spec.model.cache.hostPath (it needs --pod-security=privileged)" in failure.message
    assert PodSecurity(profile="privileged").failure(node_service(), ("unified",)) is None


def copying(state: dict[str, Any]) -> dict[str, Any]:
    return {"status": {"initContainerStatuses": [{"name": "mini-infer-model", "state": state}]}}


RUNNING, DONE = copying({"running": {}}), copying({"terminated": {"exitCode": 0}})
FAULTY = copying({"terminated": {"exitCode": 1}})


@pytest.mark.parametrize(
    ("pods", "progress", "expected"),
    [
        ([], None, ("Waiting", None, None)),
        ([{}, FAULTY, copying({"waiting": {}})], None, ("Waiting", None, None)),
        ([RUNNING], None, ("Copying", None, None)),
        ([RUNNING, DONE], (50, 200), ("Copying", 50, 25)),
        ([DONE], (50, 200), ("Ready", None, 100)),
    ],
)
def test_the_status_follows_the_pods_that_copy_onto_their_nodes(
    pods: list[dict[str, Any]], progress: tuple[int, int] | None, expected: tuple[str, int | None, int | None]
) -> None:
    status = node_copy_status(node_service(), pods, progress)
    assert status is not None
    assert (status.state, status.copied_bytes, status.percent) == expected
    assert (status.claim, status.host_path) == (None, "/var/lib/models")
    assert node_copy_status(service_of(), pods, progress) is None
