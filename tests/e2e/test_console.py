"""The console on a cluster: a chat at the clients' port, and engines, a lost pod and a rollout at the admin port."""

import json
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.commands import ROOT, log_line
from tests.e2e.questions import ANSWER, QUESTION
from tests.e2e.release import SYSTEM, Release
from tests.support.chromium import Browser, require_chromium
from tests.support.services import changed

ADMIN_PORT = "8081"
NAME = "console"
MODEL = "console-demo"
"""A name that no other test serves: for 300 s after its service's end, a name is free for nobody else."""


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_a_person_chats_and_sees_a_pod_lost_and_a_rollout_pass_when_the_console_is_open(
    cluster: Cluster, release: Release, namespace: str
) -> None:
    require_chromium()
    demo = yaml.safe_load((ROOT / "examples/demo.yaml").read_text())
    spec = {"model": {"name": MODEL}, "rollout": {"minReadySeconds": 0}}
    cluster.apply(yaml.safe_dump(changed({"metadata": {"name": NAME, "namespace": namespace}, "spec": spec}, demo)))
    with Browser() as browser:
        cluster.kubectl("wait", f"infsvc/{NAME}", "-n", namespace, "--for=condition=Ready", "--timeout=180s")
        release.wait()
        (gateway, *_) = cluster.get("pods", "-n", SYSTEM, "-l", "app.kubernetes.io/component=gateway")
        pod = f"pod/{gateway['metadata']['name']}"
        with cluster.forward(SYSTEM, pod, "8080") as url, cluster.forward(SYSTEM, pod, ADMIN_PORT) as admin_url:
            chats(browser, url, namespace)
            explains_a_hit(url, admin_url)
            watches_the_fleet(browser, admin_url, cluster, namespace)


def chats(browser: Browser, url: str, namespace: str) -> None:
    """A chat in the playground; without a key, the clients' port says nothing of engines or requests."""
    wait_until(
        "the model at the gateway", lambda: MODEL in httpx.get(f"{url}/v1/models", timeout=60).text, timeout_s=60
    )
    browser("open", url=url)
    browser("until", selector=".talk", matches=MODEL)
    browser("choose", label="Model", value=MODEL)
    told = browser("ask", text=QUESTION[0]["content"])
    assert ANSWER.replace("`", "") in told["text"]  # code is shown as an element
    log_line(f"the console's playground answered: {told['text'].splitlines()[1]!r}")
    browser("go", page="fleet")
    browser("until", selector=".cards", matches=f"{namespace}/{NAME}")
    browser("until", selector=".cards", matches="AllReplicasReady")
    assert browser("count", selector="table.engines") == 0
    browser("go", page="requests")
    browser("until", matches="its admin port lists all")
    assert browser("problems") == []


def watches_the_fleet(browser: Browser, admin_url: str, cluster: Cluster, namespace: str) -> None:
    """The admin port shows engines: one that is deleted and its successor, then all of a new revision."""
    browser("open", url=admin_url)
    browser("go", page="fleet")
    before = ready(admin_url, namespace)
    assert len(before) == 2
    (lost, *_) = before
    browser("until", selector=f'[data-engine="{lost}"][data-state="ready"]', matches=lost)
    cluster.kubectl("delete", "pod", lost.partition("/")[2], "-n", namespace, "--wait=false")
    browser("until", selector=f'[data-engine^="{namespace}/"][data-state="draining"]', matches="takes no new requests")
    wait_until("two engines again", lambda: len(ready(admin_url, namespace) - {lost}) == 2, timeout_s=180)
    for engine in ready(admin_url, namespace) - before:
        browser("until", selector=f'[data-engine="{engine}"][data-state="ready"]', matches=engine)
    log_line(f"the console saw {lost} go, and its successor come")

    old = ready(admin_url, namespace)
    patch = json.dumps({"spec": {"unified": {"replicas": 1, "engine": {"maxModelLen": 2048}}}})
    cluster.kubectl("patch", f"infsvc/{NAME}", "-n", namespace, "--type=merge", "-p", patch)
    browser("until", selector=".cards", matches=r"Rollout: \d", limit_ms=120_000)

    def only_new() -> bool:
        now = ready(admin_url, namespace)
        return bool(now) and not now & old

    wait_until("only new engines", only_new, timeout_s=180)
    browser("until", selector=".cards", matches=f"{namespace}/{NAME}.*AllReplicasReady")
    assert browser("problems") == []
    log_line("the console saw a rollout pass")


def explains_a_hit(url: str, admin_url: str) -> None:
    """A prompt that was sent before is found on one engine, with every scorer's number."""
    text = "What does textwrap.dedent do, and what does textwrap.indent do? " * 8
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text

    def explained() -> Any:
        told = httpx.post(f"{admin_url}/console/api/explain", json=body, timeout=60).json()
        return told if told.get("cached_tokens", 0) > told.get("prompt_tokens", 0) - 32 > 0 else None

    told = wait_until("the hit explained", explained, timeout_s=30)
    assert set(told["engines"][0]["scores"]) == {"cached_prefix", "queue_wait", "decode_slots", "cache_room"}
    log_line(
        f"{told['cached_tokens']} of {told['prompt_tokens']} tokens are on {told['chosen']}, since {told['reason']}"
    )


def get(url: str, name: str) -> Any:
    return httpx.get(f"{url}/console/api/{name}", timeout=30).json()


def ready(admin_url: str, namespace: str) -> set[str]:
    """The names of the namespace's engines that are ready, as the gateway sees them."""
    own = (engine for engine in get(admin_url, "fleet")["engines"] if engine["service"] == f"{namespace}/{NAME}")
    return {engine["name"] for engine in own if engine["state"] == "ready"}
