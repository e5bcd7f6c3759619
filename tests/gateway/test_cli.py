"""Flags to settings, and what a wrong start says."""

import socket

import pytest

from mini_infer_gateway.cli import listen, parse
from mini_infer_gateway.settings import GatewaySettings


def test_flags_become_settings() -> None:
    assert parse(["--endpoints", "e.json"]) == GatewaySettings(endpoints_file="e.json")
    settings = parse(["--kubernetes", "--namespace", "ns", "--routing", "round-robin", "--idle-timeout", "5"])
    assert settings == GatewaySettings(kubernetes=True, namespace="ns", routing="round-robin", idle_timeout_s=5.0)
    settings = parse(["--endpoints", "e.json", "--tokenizer", "/all", "--tokenizer", "org/model=/a=b"])
    assert settings.tokenizers == {"": "/all", "org/model": "/a=b"}
    settings = parse(["--endpoints", "e.json", "--responses-memory", "10Mi", "--responses-ttl", "60"])
    assert (settings.responses_memory_bytes, settings.responses_ttl_s) == (10 << 20, 60.0)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "one of the arguments"),
        (["--endpoints", "e", "--kubernetes"], "not allowed with"),
        (["--endpoints", "e", "--namespace", "ns"], "need --kubernetes"),
        (["--endpoints", "e", "--routing", "best"], "invalid choice"),
        (["--endpoints", "e", "--prot", "1"], "unrecognized arguments"),
    ],
)
def test_mistakes_are_named(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert complaint in capsys.readouterr().err


def test_a_busy_port_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(SystemExit, match=f"port {port} on 127.0.0.1 is in use"):
            listen("127.0.0.1", port)
