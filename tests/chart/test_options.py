"""What each value of the chart becomes, and that every flag of the programs can be set through it."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.test_chart import CHART, helm, needs_helm, of_kind
from tests.engine.server.dry_server import environment

pytestmark = [pytest.mark.cluster, needs_helm]

FULL = Path(__file__).with_name("full.values.yaml")
"""Every value set to something other than its default."""
SET_BY_THE_CHART = {
    "mini_infer_gateway.cli": {
        "host",
        "port",
        *("endpoints", "tokenizer"),  # of servers that are not the operator's
        "kubernetes",
        "namespace",
        "kubeconfig",
        "shutdown-timeout",
        "admin-port",
        *("replicas", "replica-host"),
        "memory-limit",
        *("api-key", "api-key-file", "engine-api-key-file", "peer-key-file"),
        *("ssl-certfile", "ssl-keyfile", "ssl-ca-certs", "ssl-cert-reqs"),
        # Engines in pods are reached by plain HTTP.
        *("engine-ca-certs", "engine-certfile", "engine-keyfile", "engine-server-name"),
    },
    "mini_infer_operator.settings": {
        *(
            "engine-image",
            "engine-cuda-image",
            "engine-image-pull-policy",
            "gateways",
            *("allow-ingress-from", "allow-http-from"),
            "gateway-url",
            *("pod-security", "allow-secrets", "allow-service-accounts"),
            "namespaces",
        ),
        *("health-port", "resync-seconds", "log-level", "identity", "operator-class", "leader-election-namespace"),
    },
}
MAIN = {"mini_infer_gateway.cli": "main", "mini_infer_operator.settings": "parse_settings"}


def rendered(*arguments: str) -> list[dict[str, Any]]:
    done = helm("template", "mini-infer", str(CHART), "--namespace=here", *arguments)
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item]


@pytest.fixture(scope="module")
def full() -> list[dict[str, Any]]:
    return rendered(f"--values={FULL}")


def container(items: list[dict[str, Any]], component: str) -> dict[str, Any]:
    pod = of_kind(items, "Deployment")[f"mini-infer-{component}"]["spec"]["template"]["spec"]
    return dict(pod["containers"][0])


def schema_of(path: str) -> dict[str, Any]:
    node = json.loads((CHART / "values.schema.json").read_text())
    for name in path.split("."):
        node = node["properties"][name]
    return dict(node["properties"])


def camel(flag: str) -> str:
    first, *rest = flag.split("-")
    return first + "".join(part.capitalize() for part in rest)


@pytest.mark.parametrize(
    ("module", "path"),
    [
        ("mini_infer_gateway.cli", "gateway.options"),
        ("mini_infer_operator.settings", "operator.options"),
    ],
)
def test_every_flag_is_a_chart_value(module: str, path: str) -> None:
    call = f"from {module} import {MAIN[module]} as run; run(['--help'])"
    help_text = subprocess.run(
        [sys.executable, "-c", call], capture_output=True, text=True, env=environment(), check=True
    ).stdout
    flags = set(re.findall(r"^  --([a-z][a-z-]*)", help_text, re.MULTILINE)) - {"help", "version"}
    assert {camel(flag) for flag in flags - SET_BY_THE_CHART[module]} == set(schema_of(path)), (
        f"{path} in values.schema.json must name every flag that the chart does not set itself"
    )
    for name, described in schema_of(path).items():
        if "enum" in described:
            flag = re.sub(r"([A-Z])", lambda match: "-" + match[1].lower(), name)
            assert f"--{flag} {{{','.join(described['enum'])}}}" in " ".join(help_text.split())


def test_chart_options_become_flags(full: list[dict[str, Any]]) -> None:
    arguments = container(full, "gateway")["args"]
    assert {"--routing=round-robin", "--max-body-bytes=33554432", "--idle-timeout=2.5", "--seed=3"} <= set(arguments)
    assert "--shutdown-timeout=105" in arguments  # of 120 s, 10 before and 5 after
    assert not any("routing" in argument for argument in container(rendered(), "gateway")["args"])


def test_the_chart_sets_a_separate_gpu_image(full: list[dict[str, Any]]) -> None:
    digest = f"sha256:{'4' * 64}"
    assert f"--engine-cuda-image=registry/engine-cuda:2@{digest}" in container(full, "operator")["args"]
    without = container(rendered("--set=engine.cudaImage.repository="), "operator")["args"]
    assert not any("cuda" in argument for argument in without)


def test_an_image_is_named_by_its_digest_when_there_is_one(full: list[dict[str, Any]]) -> None:
    for component, digit in (("operator", "1"), ("gateway", "2")):
        assert container(full, component)["image"] == f"registry/{component}:1@sha256:{digit * 64}"
    assert f"--engine-image=registry/engine:1@sha256:{'3' * 64}" in container(full, "operator")["args"]
    alone = rendered(f"--set=gateway.image.digest=sha256:{'5' * 64}")
    assert container(alone, "gateway")["image"] == f"mini-infer-gateway@sha256:{'5' * 64}"
    refused = helm("template", "mini-infer", str(CHART), "--set=gateway.image.digest=latest")
    assert refused.returncode != 0
    assert "digest" in refused.stderr


def test_pod_security_values_reach_the_operator(full: list[dict[str, Any]]) -> None:
    arguments = set(container(full, "operator")["args"])
    assert {"--pod-security=baseline", "--allow-secrets=team-a/*,engine-key"} <= arguments
    assert "--allow-service-accounts=weights-reader" in arguments
    default = {"--pod-security=restricted", "--allow-secrets=hub-token,hf-token", "--allow-service-accounts="}
    assert default <= set(container(rendered(), "operator")["args"])


def test_the_leader_election_namespace_is_shared_by_all_releases_of_a_class(full: list[dict[str, Any]]) -> None:
    for items, namespace in (
        (full, "leases"),
        (rendered(), "kube-system"),
        (rendered("--set=namespace=team"), "here"),
    ):
        assert f"--leader-election-namespace={namespace}" in container(items, "operator")["args"]
        for kind in ("Role", "RoleBinding"):
            (rights,) = [i for i in items if i["kind"] == kind and i["metadata"]["name"] == "mini-infer-operator-lease"]
            assert rights["metadata"]["namespace"] == namespace
    assert rights["subjects"][0]["namespace"] == "here"
    assert "--operator-class=blue" in container(full, "operator")["args"]
    assert not any("class" in argument for argument in container(rendered(), "operator")["args"])
    assert helm("template", "mini-infer", str(CHART), "--set=operator.class=Blue").returncode != 0


def test_services_are_dual_stack_by_default(full: list[dict[str, Any]]) -> None:
    for items, policy in ((rendered(), "PreferDualStack"), (full, "SingleStack")):
        assert of_kind(items, "Service")["mini-infer-gateway"]["spec"]["ipFamilyPolicy"] == policy
        assert "--host=::" in container(items, "gateway")["args"]
    left_out = of_kind(rendered("--set=gateway.service.ipFamilyPolicy="), "Service")["mini-infer-gateway"]["spec"]
    assert "ipFamilyPolicy" not in left_out


def test_every_chart_value_is_in_the_full_example() -> None:
    shown, default = yaml.safe_load(FULL.read_text()), yaml.safe_load((CHART / "values.yaml").read_text())

    def missing(shown: Any, default: Any, path: str) -> list[str]:
        if shown is None:
            return [f"{path} is missing"]
        if not isinstance(default, dict) or not default or path.endswith((".resources", ".labels")):
            may_stay = path.endswith(".options") or path == ".networkPolicy.enabled"  # false leaves nothing to see
            return [f"{path} has its default"] if shown == default and not may_stay else []
        return [problem for key in default for problem in missing(shown.get(key), default[key], f"{path}.{key}")]

    assert missing(shown, default, "") == []


def test_pods_get_the_configured_chart_values(full: list[dict[str, Any]]) -> None:
    for component in ("gateway", "operator"):
        deployment = of_kind(full, "Deployment")[f"mini-infer-{component}"]
        template = deployment["spec"]["template"]
        assert template["metadata"]["labels"]["team"] == component
        assert template["metadata"]["annotations"]["note"] == component
        assert deployment["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        pod = template["spec"]
        assert pod["priorityClassName"] == "high"
        assert pod["imagePullSecrets"] == [{"name": "pull"}]
        assert (pod["nodeSelector"], pod["tolerations"][0]["key"]) == ({"pool": "system"}, "system")
        assert "nodeAffinity" in pod["affinity"]
        described = container(full, component)
        assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in described["env"]
        assert described["envFrom"] == [{"secretRef": {"name": "extra"}}]
        account = of_kind(full, "ServiceAccount")[f"mini-infer-{component}"]
        assert account["metadata"]["annotations"] == {"iam": component}


def test_gateways_have_spread_disruption_budget_and_autoscaler(full: list[dict[str, Any]]) -> None:
    plain = rendered()
    pod = of_kind(plain, "Deployment")["mini-infer-gateway"]["spec"]["template"]["spec"]
    assert [c["topologyKey"] for c in pod["topologySpreadConstraints"]] == [
        "kubernetes.io/hostname",
        "topology.kubernetes.io/zone",
    ]
    labels = of_kind(plain, "Deployment")["mini-infer-gateway"]["spec"]["selector"]["matchLabels"]
    budget = of_kind(plain, "PodDisruptionBudget")["mini-infer-gateway"]["spec"]
    assert (budget["selector"]["matchLabels"], budget["maxUnavailable"]) == (labels, 1)
    assert not of_kind(plain, "HorizontalPodAutoscaler")

    deployment = of_kind(full, "Deployment")["mini-infer-gateway"]["spec"]
    assert "replicas" not in deployment, "it would fight with the autoscaler at every upgrade"
    autoscaler = of_kind(full, "HorizontalPodAutoscaler")["mini-infer-gateway"]["spec"]
    assert (autoscaler["minReplicas"], autoscaler["maxReplicas"]) == (3, 5)
    assert [metric["type"] for metric in autoscaler["metrics"]] == ["Resource", "Pods"]
    assert container(full, "gateway")["lifecycle"]["preStop"]["sleep"]["seconds"] == 10


def test_ingress_and_route_expose_the_gateway(full: list[dict[str, Any]]) -> None:
    ingress = of_kind(full, "Ingress")["mini-infer-gateway"]["spec"]
    assert ingress["tls"] == [{"secretName": "llm-tls", "hosts": ["llm.example.com"]}]
    (rule,) = ingress["rules"]
    assert [path["path"] for path in rule["http"]["paths"]] == ["/v1", "/tokenize"], "never /metrics or /debug"
    route = of_kind(full, "HTTPRoute")["mini-infer-gateway"]["spec"]
    assert route["parentRefs"] == [{"name": "public", "namespace": "infra"}]
    assert route["rules"][0]["backendRefs"] == [{"name": "mini-infer-gateway", "port": 8080}]
    assert route["rules"][0]["timeouts"] == {"request": "600s"}
    assert not of_kind(rendered(), "Ingress")
    assert "--gateway-url=https://llm.example.com" in container(full, "operator")["args"]


def test_api_keys_come_from_secrets_and_not_from_arguments(full: list[dict[str, Any]]) -> None:
    described = container(full, "gateway")
    assert "--api-key-file=/etc/mini-infer/api-keys/list" in described["args"]
    assert "--engine-api-key-file=/etc/mini-infer/engine-api-key/value" in described["args"]
    mounted = {mount["name"]: mount["mountPath"] for mount in described["volumeMounts"]}
    pod = of_kind(full, "Deployment")["mini-infer-gateway"]["spec"]["template"]["spec"]
    secrets = {volume["name"]: volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
    root = secrets.pop("peer-root")
    assert root == "mini-infer-peer-root"
    assert f"--peer-key-file={mounted.pop('peer-root')}/key" in described["args"]
    assert secrets == {"api-keys": "client-keys", "engine-api-key": "engine-key", "tls": "gateway-tls"}
    assert {name: mounted[name] for name in secrets} == {name: f"/etc/mini-infer/{name}" for name in secrets}
    assert not any("api-key" in argument for argument in container(rendered(), "gateway")["args"])


def test_probes_use_the_plain_port_when_tls_is_on(full: list[dict[str, Any]]) -> None:
    described, plain = container(full, "gateway"), container(rendered(), "gateway")
    assert {"--ssl-certfile=/etc/mini-infer/tls/tls.crt", "--ssl-cert-reqs=2"} <= set(described["args"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert described[probe]["httpGet"]["port"] == "admin"
        assert plain[probe]["httpGet"]["port"] == "http"
    assert not any("ssl" in argument for argument in plain["args"])
    without_url = rendered("--set=gateway.tls.secretName=gateway-tls")
    assert "--gateway-url=https://mini-infer-gateway.here.svc:80" in container(without_url, "operator")["args"]


def test_an_http_route_is_refused_when_no_gateway_is_named() -> None:
    done = helm("template", "mini-infer", str(CHART), "--set=gateway.httpRoute.enabled=true")
    assert done.returncode != 0
    assert "gateway.httpRoute.parentRefs: name the Gateway" in done.stderr


def test_an_ingress_has_no_host_when_none_is_set() -> None:
    items = rendered("--set=gateway.ingress.enabled=true")
    (rule,) = of_kind(items, "Ingress")["mini-infer-gateway"]["spec"]["rules"]
    assert list(rule) == ["http"]


def annotations(items: list[dict[str, Any]], component: str) -> dict[str, str]:
    metadata = of_kind(items, "Deployment")[f"mini-infer-{component}"]["spec"]["template"]["metadata"]
    return dict(metadata.get("annotations", {}))


def test_monitors_or_annotations_are_rendered_by_available_apis() -> None:
    plain, monitored = rendered(), rendered("--api-versions=monitoring.coreos.com/v1")
    off = rendered("--set=monitoring.annotations=false")
    for component, port in (("gateway", "admin"), ("operator", "health")):
        found = annotations(plain, component)
        ports = {p["name"]: str(p["containerPort"]) for p in container(plain, component)["ports"]}
        assert (found["prometheus.io/scrape"], found["prometheus.io/port"]) == ("true", ports[port])
        assert annotations(monitored, component) == annotations(off, component) == {}
        monitor = of_kind(monitored, "PodMonitor")[f"mini-infer-{component}"]["spec"]
        labels = of_kind(monitored, "Deployment")[f"mini-infer-{component}"]["spec"]["template"]["metadata"]["labels"]
        assert monitor["selector"]["matchLabels"].items() <= labels.items()
        assert monitor["podMetricsEndpoints"][0]["port"] == port
    assert not of_kind(plain, "PodMonitor")
    engines = of_kind(monitored, "PodMonitor")["mini-infer-engine"]["spec"]
    assert engines["namespaceSelector"] == {"any": True}
    named = rendered("--set=monitoring.monitors=true,namespace=team")
    assert of_kind(named, "PodMonitor")["mini-infer-engine"]["spec"]["namespaceSelector"] == {"matchNames": ["team"]}


def test_user_roles_aggregate_to_view_and_edit() -> None:
    roles = of_kind(rendered(), "ClusterRole")
    view, edit = roles["mini-infer-view"], roles["mini-infer-edit"]
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-admin"] == "true"
    assert {verb for rule in view["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    assert not of_kind(rendered("--set=rbac.aggregate=false"), "ClusterRole").keys() & {view["metadata"]["name"]}


def test_network_policies_admit_the_named_peers(full: list[dict[str, Any]]) -> None:
    policies = of_kind(full, "NetworkPolicy")
    clients, monitoring = {"namespaceSelector": {}}, {"podSelector": {"matchLabels": {"app": "prometheus"}}}
    requests, metrics, loads = policies["mini-infer-gateway"]["spec"]["ingress"]
    replicas = {"podSelector": of_kind(full, "Deployment")["mini-infer-gateway"]["spec"]["selector"]}
    assert (requests["from"], requests["ports"]) == ([clients, replicas], [{"port": "http"}])
    assert (metrics["from"], metrics["ports"]) == ([monitoring], [{"port": "admin"}])
    planner = {"podSelector": of_kind(full, "Deployment")["mini-infer-operator"]["spec"]["selector"]}
    assert (loads["from"], loads["ports"]) == ([planner], [{"port": "admin"}])
    (operator,) = policies["mini-infer-operator"]["spec"]["ingress"]
    assert operator["from"] == [monitoring]
    (flag,) = [a for a in container(full, "operator")["args"] if a.startswith("--allow-ingress-from=")]
    (gateways,) = json.loads(flag.partition("=")[2])
    (flag,) = [a for a in container(full, "operator")["args"] if a.startswith("--allow-http-from=")]
    operators, others = json.loads(flag.partition("=")[2])
    assert others == monitoring
    operator = of_kind(full, "Deployment")["mini-infer-operator"]["spec"]["template"]["metadata"]["labels"]
    assert operators["podSelector"]["matchLabels"].items() <= operator.items()
    labels = of_kind(full, "Deployment")["mini-infer-gateway"]["spec"]["template"]["metadata"]["labels"]
    assert gateways["podSelector"]["matchLabels"].items() <= labels.items()
    assert gateways["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "here"}
    off = rendered("--set=networkPolicy.enabled=false")
    closing = ("--allow-ingress-from", "--allow-http-from")
    assert not any(argument.startswith(closing) for argument in container(off, "operator")["args"])
    assert not of_kind(off, "NetworkPolicy")
    default = of_kind(rendered(), "NetworkPolicy")
    assert default["mini-infer-gateway"]["spec"]["ingress"][1]["ports"] == [{"port": "admin"}]
    closed = of_kind(rendered("--set-json=networkPolicy.monitoring=[]"), "NetworkPolicy")
    assert closed["mini-infer-operator"]["spec"]["ingress"] == []
    assert "from" not in closed["mini-infer-gateway"]["spec"]["ingress"][0], "an empty list of clients is everybody"


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("gateway.options.maxAttempt=3", "maxAttempt"),
        ("gateway.options.routing=random-walk", "routing"),
        ("gateway.ingress.paths={v1}", "paths"),
        ("gateway.podDisruptionBudget.maxUnavailable=0", "maxUnavailable"),
        ("monitoring.interval=15", "interval"),
        ("monitoring.monitors=maybe", "monitors"),
        ("gateway.url=llm.example.com", "url"),
    ],
)
def test_a_chart_option_is_refused_by_name_when_it_is_invalid(setting: str, named: str) -> None:
    done = helm("template", "mini-infer", str(CHART), f"--set={setting}")
    assert done.returncode != 0
    assert named in done.stderr
