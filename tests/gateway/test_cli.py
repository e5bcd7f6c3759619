"""Flags to settings, and what a wrong start says."""

import socket
from pathlib import Path

import pytest

from mini_infer_gateway.cli import listen, make_source, parse
from mini_infer_gateway.settings import GatewaySettings
from mini_infer_web.http_server.server import connections_for


def test_gateway_flags_become_settings() -> None:
    assert parse(["--endpoints", "e.json"]) == GatewaySettings(endpoints_file="e.json")
    settings = parse(["--kubernetes", "--namespace", "ns", "--routing", "round-robin", "--idle-timeout", "5"])
    assert settings == GatewaySettings(kubernetes=True, namespace="ns", routing="round-robin", idle_timeout_s=5.0)
    settings = parse(["--endpoints", "e.json", "--tokenizer", "/all", "--tokenizer", "org/model=/a=b"])
    assert settings.tokenizers == {"": "/all", "org/model": "/a=b"}
    settings = parse(["--endpoints", "e.json", "--responses-memory", "10Mi", "--responses-ttl", "60"])
    assert (settings.responses_memory_bytes, settings.responses_ttl_s) == (10 << 20, 60.0)
    settings = parse(["--endpoints", "e.json", "--replicas", "a:1,b", "--model-namespaces", "m=ns,*=other"])
    assert (settings.replicas, settings.replica_host) == (("a:1", "b"), "127.0.0.1")
    assert settings.model_namespaces == ("m=ns", "*=other")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "one of the arguments"),
        (["--endpoints", "e", "--kubernetes"], "not allowed with"),
        (["--endpoints", "e", "--namespace", "ns"], "need --kubernetes"),
        (["--endpoints", "e", "--routing", "best"], "invalid choice"),
        (["--endpoints", "e", "--prot", "1"], "unrecognized arguments: --prot 1: did you mean --port?"),
        (["--endpoints", "e", "--max-q", "1"], "unrecognized arguments: --max-q 1: did you mean --max-queue?"),
        (["--endpoints", "e", "--port", "70000"], "'70000' is not an integer from 0 up to 65535"),
        (["--endpoints", "e", "--host", "0.0.0.0", "--replicas", "gateways"], "--replica-host"),
        (["--endpoints", "e", "--model-namespaces", "m"], "--model-namespaces"),
        (["--endpoints", "e", "--max-queue", "-1"], "'-1' is not an integer from 0"),
        (["--endpoints", "e", "--max-attempts", "0"], "'0' is not an integer from 1"),
        (["--endpoints", "e", "--client-max-connections", "x"], "'x' is not an integer from 1"),
        (["--endpoints", "e", "--queue-timeout", "-1"], "'-1' is not a number of seconds from 0"),
        (["--endpoints", "e", "--idle-timeout", "nan"], "'nan' is not a number of seconds from 0"),
    ],
)
def test_the_error_names_the_flag_when_its_value_is_invalid(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    reported = capsys.readouterr().err
    assert complaint in reported
    assert len(reported.splitlines()) <= 3, "a long usage hides what is wrong"


def test_start_fails_with_the_reason_when_the_cluster_cannot_be_reached(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"mini-infer-gateway: --kubernetes: .*/none.*KUBECONFIG"):
        make_source(parse(["--kubernetes", "--kubeconfig", str(tmp_path / "none")]))


@pytest.mark.parametrize(
    ("open_files", "expected", "connections"),
    [(65_536, 8192, 8192), (1024, 8192, 480), (1024, 10, 10), (64, 8192, 1)],
)
def test_connection_limit_follows_the_open_files_limit(open_files: int, expected: int, connections: int) -> None:
    assert connections_for(open_files, expected) == connections


def test_the_error_names_the_port_when_it_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(SystemExit, match=f"port {port} on 127.0.0.1"):
            listen("127.0.0.1", port)
