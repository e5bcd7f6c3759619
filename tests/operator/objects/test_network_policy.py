"""Who reaches a service's engines."""

from typing import Any

import pytest

from mini_infer_contract.launch import WEIGHTS_PORT
from mini_infer_operator.launch import launch_of
from mini_infer_operator.objects.network_policy import NOBODY, network_policy
from mini_infer_operator.objects.pod import frozen_pods
from mini_infer_operator.parse import parse_service
from mini_infer_operator.settings import EnginePeers, parse_settings
from tests.support.services import VALID, changed

SERVICE = parse_service(VALID)
GATEWAYS = {"podSelector": {"matchLabels": {"app": "gateway"}}}
OPERATOR = {"podSelector": {"matchLabels": {"app": "operator"}}}


def test_network_policy_lets_gateways_reach_events_and_others_http_only() -> None:
    policy = network_policy(SERVICE, EnginePeers([GATEWAYS], [OPERATOR]))
    assert policy is not None
    rule, http, weights = policy["spec"]["ingress"]
    assert rule["from"] == [GATEWAYS]
    assert http == {"from": [OPERATOR], "ports": [{"port": "http", "protocol": "TCP"}]}
    assert weights["from"] == [{"podSelector": policy["spec"]["podSelector"]}]
    assert weights["ports"] == [{"port": WEIGHTS_PORT, "endPort": 5687, "protocol": "TCP"}]
    template = frozen_pods(SERVICE, "unified", "r", launch_of(SERVICE, "unified", "i"), None)["template"]
    (container,) = template["spec"]["containers"]
    assert {port["port"] for port in rule["ports"]} == {port["name"] for port in container["ports"]}
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


@pytest.mark.usefixtures("everything_works")
@pytest.mark.parametrize(
    "spec",
    [
        {"unified": None, "prefill": {"replicas": 1}, "decode": {"replicas": 2}},
        {"unified": {"parallelism": {"tensor": 2, "nodes": 2}}},
        {"unified": {"engine": {"kvTransport": "nixl"}}},
    ],
)
def test_network_policy_lets_engines_reach_each_other_when_they_exchange_kv(spec: dict[str, Any]) -> None:
    policy = network_policy(parse_service(changed({"spec": spec})), EnginePeers([GATEWAYS]))
    assert policy is not None
    assert policy["spec"]["ingress"][1:] == [{"from": [{"podSelector": policy["spec"]["podSelector"]}]}]


def test_no_network_policy_is_made_when_no_peer_is_named() -> None:
    assert network_policy(SERVICE, NOBODY) is None


def test_allow_ingress_from_is_parsed_as_a_list_of_peers(capsys: pytest.CaptureFixture[str]) -> None:
    value = ["--engine-image=i", '--allow-ingress-from=[{"podSelector": {}}]']
    assert parse_settings(value, {}).allow_ingress_from == ({"podSelector": {}},)
    assert parse_settings(value[:1], {}).engine_peers == NOBODY
    for wrong in ("{", "{}", "[1]"):
        with pytest.raises(SystemExit):
            parse_settings(["--engine-image=i", f"--allow-ingress-from={wrong}"], {})
    assert "is not a list of peers" in capsys.readouterr().err
