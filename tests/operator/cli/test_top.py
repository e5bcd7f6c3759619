"""`mini-infer top`: the drawing as a table, and the command against a gateway."""

import asyncio
import io
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from mini_infer_operator.cli import top as top_command
from mini_infer_operator.cli.top_views import bars, screen
from tests.engine.server.dry_server import environment, free_port
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import running_gateway

SAMPLE = {"running": 3, "waiting": 1, "kv_usage": 0.5, "hit_share": 0.25, "tokens_per_s": 1234.0}
ENGINE: dict[str, Any] = {
    "name": "ns/e1",
    "state": "broken",
    "reason": "its circuit is open: [connections] to it fail",
    "in_flight": 2,
    "now": SAMPLE,
    "history": [SAMPLE | {"tokens_per_s": float(number)} for number in range(5)],
}
SERVICE: dict[str, Any] = {
    "name": "ns/a",
    "models": ["m"],
    "engines": {"ready": 1},
    "revisions": {"r1": 1, "r2": 1},
    "status": {"conditions": [{"type": "Ready", "status": "False", "reason": "RollingOut", "message": "1 of 2"}]},
}
FLEET: dict[str, Any] = {"services": [SERVICE], "engines": [ENGINE], "waiting_here": {"m": 4}, "in_flight": 2}
REQUEST: dict[str, Any] = {
    "time": 0.0,
    "model": "m",
    "status": 200,
    "outcome": "ok",
    "duration_s": 1.5,
    "first_byte_s": None,
    "prompt_tokens": 640,
    "cached_tokens": 512,
    "completion_tokens": None,
    "key": "team-a",
    "engine": "ns/e1",
    "reason": "cached_prefix",
}


def drawn(fleet: dict[str, Any], requests: list[dict[str, Any]], rows: int = 10) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(screen("http://gateway", fleet, requests, rows=rows))
    return console.export_text()


def test_every_part_is_on_the_screen_when_everything_is_seen() -> None:
    text = drawn(FLEET, [REQUEST])
    for words in (
        *("0 of 1 engines ready, 2 requests in flight, 4 wait", "RollingOut: 1 of 2", "1 of r1, 1 of r2"),
        *("broken its circuit is open: [connections] to it fail", "50%", "25%", "1,234"),
        *("team-a", "cached_prefix", "512"),
    ):
        assert words in text


def test_services_and_own_requests_are_shown_when_engines_are_not() -> None:
    text = drawn(FLEET | {"engines": []}, [REQUEST | {"engine": "", "reason": ""}])
    assert "an administrator's key shows engines" in text
    assert "ENGINE  STATE" not in text


def test_only_as_many_requests_are_drawn_as_fit_when_there_are_more() -> None:
    assert drawn(FLEET, [REQUEST] * 9, rows=3).count("team-a") == 3


@pytest.mark.parametrize(
    ("values", "expected"), [([], ""), ([0.0, 0.0], ""), ([0.0, 4.0, 8.0], "▁▅█"), ([1.0] * 50, "█" * 20)]
)
def test_bars_are_as_high_as_values_when_they_are_drawn(values: list[float], expected: str) -> None:
    assert bars(values) == expected


def top(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mini_infer_operator.cli", "top", *flags]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment() | variables, timeout=60, check=False
    )


async def test_one_frame_is_printed_when_a_gateway_answers_and_there_is_no_terminal() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        async with gateway.chat("hello") as response:
            assert response.status == 200
        done = await asyncio.to_thread(top, "--once", "--url", gateway.url)
        terminal = {"PYTHONIOENCODING": "ascii", "COLUMNS": "30"}  # names are cut by a character that it lacks
        narrow = await asyncio.to_thread(lambda: top("--once", "--url", gateway.url, **terminal))
    assert done.returncode == 0, done.stderr
    assert "1 of 1 engines ready" in done.stdout
    assert narrow.returncode == 0, narrow.stderr
    assert r"\u2026" in narrow.stdout


def test_it_says_where_it_looked_when_there_is_no_gateway() -> None:
    done = top("--url", f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 1
    assert "is `mini-infer up` or `mini-infer-serve` running?" in done.stderr


class _Answer(io.BytesIO):
    """Bytes of an HTTP answer."""


@pytest.mark.parametrize(
    "body", [b"<html>", b"[]", b"null", b"{}", b'{"engines": 1, "services": []}', b"\xff", b"[" * 99_999]
)
def test_it_says_so_when_the_server_is_no_gateway(
    body: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top_command, "open_server", lambda url, **_: _Answer(body))
    assert top_command.top("http://x", once=True) == 1
    assert "is no console of a gateway" in capsys.readouterr().err


def test_the_stream_that_follows_is_read_on_when_one_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = b'event: fleet\ndata: {"engines": [], "services": []}\n\n'
    asked = b'event: requests\ndata: [{"id": "a"}]\n\n'
    streams = [fleet, fleet + asked]
    monkeypatch.setattr(top_command, "open_server", lambda url, **_: _Answer(streams.pop(0)))
    monkeypatch.setattr(top_command, "RETRY_PAUSE_S", 0.0)
    frames = top_command._frames("http://x")
    seen = []
    for _ in range(3):
        frames, (_, requests) = top_command._next(frames, "http://x")
        seen.append(requests)
    assert (seen, streams) == ([[], [], [{"id": "a"}]], [])
