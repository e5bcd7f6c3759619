"""From `helm install` to an answer through the gateway's Service, and back to an empty cluster."""

import time
from collections.abc import Iterator

import openai
import pytest

from mini_infer_contract.resources import GROUP, LABEL_SERVICE, PLURAL, SCALER_PLURAL
from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.commands import ROOT, say
from tests.e2e.images import TAG, repository
from tests.e2e.questions import ANSWER, QUESTION

RELEASE = "mini-infer"
SYSTEM, USER = "mini-infer-e2e-system", "mini-infer-e2e-user"
"""Namespaces: of the release, and of the InferenceService."""
SERVICE_KINDS = (
    "deployments,replicasets,pods,services,endpointslices,controllerrevisions,poddisruptionbudgets,networkpolicies"
)
RELEASE_KINDS = (
    f"{SERVICE_KINDS},serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings,secrets,configmaps"
)


@pytest.fixture
def namespaces(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[None]:
    """Two empty namespaces; explains a failure and leaves nothing behind."""
    crd, scalers = f"{PLURAL}.{GROUP}", f"{SCALER_PLURAL}.{GROUP}"
    if cluster.get("crd", "--field-selector", f"metadata.name={crd}"):
        pytest.fail(f"this cluster has {crd} already: the test would remove it, with everything made of it")
    failed_before = request.session.testsfailed
    try:
        for namespace in (SYSTEM, USER):
            cluster.kubectl("create", "namespace", namespace)
        yield
    finally:
        if request.session.testsfailed > failed_before:
            cluster.explain(SYSTEM, USER)
        if RELEASE in cluster.helm("list", "--short", "-n", SYSTEM).split():
            cluster.helm("uninstall", RELEASE, "-n", SYSTEM)
        cluster.kubectl("delete", "crd", crd, scalers, "--ignore-not-found")
        # The next test makes namespaces of the same names, so this one waits until they are gone.
        cluster.kubectl("delete", "namespace", SYSTEM, USER, "--ignore-not-found", "--timeout=120s")
        say("the CRD and the namespaces are deleted")


@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("namespaces")
def test_an_openai_client_gets_an_answer_and_nothing_is_left(cluster: Cluster) -> None:
    started = time.monotonic()
    install(cluster)
    cluster.kubectl("apply", "-n", USER, "-f", str(ROOT / "examples/demo.yaml"))
    say("helm install done, examples/demo.yaml applied")
    cluster.kubectl("wait", "infsvc/demo", "-n", USER, "--for=condition=Ready", "--timeout=180s")
    say("the InferenceService is Ready")
    cluster.kubectl("rollout", "status", f"deployment/{RELEASE}-gateway", "-n", SYSTEM, "--timeout=60s")
    assert "Phase:          Succeeded" in cluster.helm("test", RELEASE, "-n", SYSTEM, "--timeout=90s")
    say("helm test succeeded")
    with cluster.reach(SYSTEM, f"{RELEASE}-gateway") as url:
        say(f"the gateway is at {url}")
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5) as client:
            ask(client, started)
    cluster.kubectl("scale", "infsvc/demo", "-n", USER, "--replicas=1")
    wait_until("one engine", lambda: engines(cluster) == 1, timeout_s=60)
    say("kubectl scale left one engine")
    print(cluster.kubectl("get", "infsvc,pods", "-A", "-o", "wide"))

    cluster.kubectl("delete", "-n", USER, "-f", str(ROOT / "examples/demo.yaml"))
    nothing_left(cluster, SERVICE_KINDS, LABEL_SERVICE)
    say("the InferenceService is deleted, nothing of it is left")
    cluster.helm("uninstall", RELEASE, "-n", SYSTEM)
    nothing_left(cluster, RELEASE_KINDS, f"app.kubernetes.io/instance={RELEASE}")
    say("the release is uninstalled, nothing of it is left")


def engines(cluster: Cluster) -> int:
    (service,) = cluster.get("infsvc", "demo", "-n", USER)
    return int(service["status"]["replicas"])


def install(cluster: Cluster, **more: str) -> None:
    cluster.helm("install", RELEASE, str(ROOT / "charts/mini-infer"), "-n", SYSTEM, *release_flags(TAG, **more))


def release_flags(tag: str, **more: str) -> list[str]:
    """Values of the release for images of this tag, which the cluster has already."""
    settings = {"gateway.service.type": "NodePort", "networkPolicy.enabled": "true"}
    for part, target in (("gateway", "gateway"), ("operator", "operator"), ("engine", "engine-cpu")):
        settings |= {
            f"{part}.image.repository": repository(target),
            f"{part}.image.tag": tag,
            f"{part}.image.pullPolicy": "Never",
        }
    return [f"--set={name}={value}" for name, value in {**settings, **more}.items()]


def ask(client: openai.OpenAI, started: float) -> None:
    """One answer whole and one streamed: the same words, and the right ones."""
    whole = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0, max_tokens=60)
    text = whole.choices[0].message.content or ""
    say(f"answer {time.monotonic() - started:.1f} s after helm install began: {text!r}")
    assert ANSWER in text
    stream = client.chat.completions.create(
        model="demo",
        messages=QUESTION,
        temperature=0,
        max_tokens=60,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(pieces) == text
    assert len(pieces) > 3, "the answer came in one piece: it was not streamed"
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
    assert cached_tokens >= 16, "the same question did not reach the engine that has its first block"
    say(f"streamed the same in {len(pieces)} pieces, {cached_tokens} of {usage.prompt_tokens} prompt tokens cached")
    assert "demo" in [model.id for model in client.models.list()]


def nothing_left(cluster: Cluster, kinds: str, selector: str) -> None:
    def gone() -> bool:
        left.clear()
        left.extend(f"{item['kind']} {item['metadata']['name']}" for item in cluster.get(kinds, "-A", "-l", selector))
        return not left

    left: list[str] = []
    try:
        wait_until(f"{selector} to be gone", gone, timeout_s=90)
    except TimeoutError:
        pytest.fail(f"left behind: {', '.join(left)}")
