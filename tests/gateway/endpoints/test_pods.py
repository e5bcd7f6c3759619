"""Pods to endpoints, as a table."""

from typing import Any

import msgspec
import pytest

from mini_infer_gateway.endpoints.pods import Pod, listed_from_pod
from mini_infer_operator.resource import GROUP, LABEL_GROUP, LABEL_WORKER_INDEX


def pod(**changes: Any) -> Pod:
    """A ready pod of our operator; `changes` by section."""
    content: dict[str, Any] = {
        "metadata": {
            "name": "p",
            "namespace": "ns",
            "creationTimestamp": None,
            "labels": {f"{GROUP}/service": "svc", f"{GROUP}/role": "unified", f"{GROUP}/revision": "r1"},
            "annotations": {f"{GROUP}/model": "m", f"{GROUP}/service-created": "2026-01-01T00:00:00Z"},
        },
        "spec": {"containers": [{"name": "engine", "image": "x", "ports": changes.get("ports", [])}]},
        "status": {"phase": "Running", "podIP": "10.0.0.7", "conditions": [{"type": "Ready", "status": "True"}]},
    }
    content["metadata"] |= changes.get("metadata", {})
    content["metadata"]["labels"] |= changes.get("labels", {})
    content["status"] |= changes.get("status", {})
    return msgspec.convert(content, Pod)


def test_endpoint_fields_are_read_when_a_pod_is_ready() -> None:
    listed = listed_from_pod(pod())
    assert listed is not None
    assert listed.ready
    endpoint = listed.endpoint
    assert (endpoint.name, endpoint.service, endpoint.model) == ("ns/p", "ns/svc", "m")
    assert (endpoint.url, endpoint.events, endpoint.replay) == (
        "http://10.0.0.7:8000",
        "tcp://10.0.0.7:5557",
        "tcp://10.0.0.7:5558",
    )
    assert (endpoint.revision, endpoint.service_created) == ("r1", "")


@pytest.mark.parametrize(
    "changes",
    [
        {"status": {"podIP": ""}},
        {"status": {"phase": "Succeeded"}},
        {"status": {"phase": "Failed"}},
        {"metadata": {"annotations": {}}},
        {"labels": {LABEL_GROUP: "g", LABEL_WORKER_INDEX: "1"}},
    ],
)
def test_no_endpoint_is_listed_when_a_pod_lacks_a_required_field(changes: dict[str, Any]) -> None:
    assert listed_from_pod(pod(**changes)) is None


@pytest.mark.parametrize(
    ("changes", "draining"),
    [
        ({"labels": {f"{GROUP}/draining": "true"}}, True),
        ({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, True),
        ({"status": {"conditions": [{"type": "Ready", "status": "False"}]}}, False),
        ({"status": {"conditions": []}}, False),
    ],
)
def test_an_endpoint_is_not_ready_when_its_pod_is_unready_or_draining(changes: dict[str, Any], draining: bool) -> None:
    listed = listed_from_pod(pod(**changes))
    assert listed is not None
    assert not listed.ready
    assert listed.endpoint.draining == draining


def test_urls_use_named_ports_and_brackets_when_the_pod_ip_is_ipv6() -> None:
    ports = [{"name": "http", "containerPort": 9000}, {"name": "events", "containerPort": 9001}]
    listed = listed_from_pod(pod(ports=ports, status={"podIP": "fd00::7"}))
    assert listed is not None
    assert listed.endpoint.url == "http://[fd00::7]:9000"
    assert listed.endpoint.events == "tcp://[fd00::7]:9001"
    assert listed.endpoint.replay == ""


def test_transfer_port_and_group_are_read_when_a_pod_is_the_leader_of_a_group() -> None:
    ports = [{"name": name, "containerPort": port} for name, port in (("http", 8000), ("transfer", 5559))]
    labels = {LABEL_GROUP: "hash", LABEL_WORKER_INDEX: "0", f"{GROUP}/role": "prefill"}
    listed = listed_from_pod(pod(ports=ports, labels=labels))
    assert listed is not None
    endpoint = listed.endpoint
    assert (endpoint.transfer, endpoint.group, endpoint.role) == ("tcp://10.0.0.7:5559", "hash", "prefill")


def test_transfer_address_is_empty_when_a_pod_has_no_transfer_port() -> None:
    listed = listed_from_pod(pod())
    assert listed is not None
    assert (listed.endpoint.transfer, listed.endpoint.group) == ("", "")
