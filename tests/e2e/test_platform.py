"""From `helm install` to an answer through the gateway's Service, and back to an empty namespace."""

import time

import openai
import pytest

from mini_infer_operator.resource import LABEL_SERVICE
from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.commands import ROOT, log_line
from tests.e2e.questions import ANSWER, QUESTION
from tests.e2e.release import RELEASE, SERVICE_KINDS, SYSTEM, Release, nothing_left


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_an_openai_client_is_answered_and_deletion_leaves_nothing(
    cluster: Cluster, release: Release, namespace: str
) -> None:
    cluster.kubectl("apply", "-n", namespace, "-f", str(ROOT / "examples/demo.yaml"))
    cluster.kubectl("wait", "infsvc/demo", "-n", namespace, "--for=condition=Ready", "--timeout=180s")
    log_line("the InferenceService is Ready")
    release.wait()
    with cluster.reach(SYSTEM, f"{RELEASE}-gateway") as url:
        log_line(f"the gateway is at {url}")
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5) as client:
            send_request(client, release.begun_s)
    cluster.kubectl("scale", "infsvc/demo", "-n", namespace, "--replicas=1")
    wait_until("one engine", lambda: engines(cluster, namespace) == 1, timeout_s=120)
    log_line("kubectl scale left one engine")
    print(cluster.kubectl("get", "infsvc,pods", "-A", "-o", "wide"))

    cluster.kubectl("delete", "-n", namespace, "-f", str(ROOT / "examples/demo.yaml"))
    assert "Phase:          Succeeded" in cluster.helm("test", RELEASE, "-n", SYSTEM, "--timeout=90s")
    log_line("helm test succeeded, while the engines end")
    nothing_left(cluster, SERVICE_KINDS, LABEL_SERVICE, "-n", namespace)
    log_line("the InferenceService is deleted, nothing of it is left")


def engines(cluster: Cluster, namespace: str) -> int:
    (service,) = cluster.read("InferenceService", namespace, "demo")
    return int(service["status"]["replicas"])


def send_request(client: openai.OpenAI, started: float) -> None:
    """One answer whole and one streamed: the same words, and the right ones."""
    whole = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0, max_tokens=60)
    text = whole.choices[0].message.content or ""
    log_line(f"answer {time.monotonic() - started:.1f} s after helm install began: {text!r}")
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
    log_line(
        f"streamed the same in {len(pieces)} pieces, {cached_tokens} of {usage.prompt_tokens} prompt tokens cached"
    )
    assert "demo" in [model.id for model in client.models.list()]
