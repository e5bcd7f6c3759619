"""The conversation's commands, and the command against a real server."""

import io
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from mini_infer_operator.cli import chat, server_access
from mini_infer_operator.cli.conversation import HELP, CommandError, Conversation
from tests.engine.server.dry_server import DryServer, environment, free_port


def body_after(*lines: str) -> dict[str, Any]:
    talk = Conversation("m")
    for line in lines:
        if talk.command(line) is None:
            talk.send(line)
            talk.answered(f"to {line}")
    return talk.body()


@pytest.mark.parametrize(
    ("lines", "changes"),
    [
        ([], {}),
        (["/temperature 0.5"], {"temperature": 0.5}),
        (["/temperature 0.5", "/temperature"], {}),
        (["/thinking on"], {"reasoning_effort": "medium"}),
        (["/thinking off"], {"reasoning_effort": "none"}),
        (["/thinking off", "/thinking"], {}),
        (["/system Be brief."], {"messages": [{"role": "system", "content": "Be brief."}]}),
        (["/system Be brief.", "/reset"], {"messages": [{"role": "system", "content": "Be brief."}]}),
        (["/system Be brief.", "/system"], {}),
        (["hi", "/reset"], {}),
        (["//etc"], {"messages": [{"role": "user", "content": "/etc"}, {"role": "assistant", "content": "to //etc"}]}),
        (["hi"], {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "to hi"}]}),
    ],
)
def test_chat_request_has_the_values_set_by_commands(lines: list[str], changes: dict[str, Any]) -> None:
    assert body_after(*lines) == {"model": "m", "messages": [], "stream": True} | changes


@pytest.mark.parametrize(
    "line", ["/temperature hot", "/temperature 3", "/temperature nan", "/thinking maybe", "/nothing"]
)
def test_chat_command_raises_when_it_is_invalid(line: str) -> None:
    talk = Conversation("m")
    with pytest.raises(CommandError):
        talk.command(line)
    assert talk == Conversation("m")


def run(*flags: str, reported: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mini_infer_operator.cli", "chat", *flags]
    return subprocess.run(command, input=reported, capture_output=True, text=True, env=environment() | more, timeout=60)


def test_chat_talks_to_a_lone_server_when_it_needs_a_key() -> None:
    with DryServer("--api-key", "sk-1") as server:
        done = run(
            "--url", server.url, "--system", "x", reported="/help\n/no\none\n/quit\ntwo\n", OPENAI_API_KEY="sk-1"
        )
        assert (done.returncode, done.stdout) == (0, f"{HELP}\nYou said: one\n"), done.stderr
        assert done.stderr.startswith("(there is no /no: ")
        by_variable = run(reported="hi\n", OPENAI_API_KEY="sk-1", OPENAI_BASE_URL=f"{server.url}/v1")
        assert by_variable.stdout == "You said: hi\n"
        refused = run("--url", server.url, reported="hi\n", OPENAI_API_KEY="sk-2")
        assert (refused.returncode, "401" in refused.stderr) == (1, True)


@pytest.fixture(scope="module")
def server() -> Iterator[DryServer]:
    with DryServer() as started:
        yield started


def test_no_proxy_is_used_when_the_server_is_on_this_machine(server: DryServer) -> None:
    done = run("--url", server.url, reported="hi\n", http_proxy="http://127.0.0.1:1", no_proxy="")
    assert (done.returncode, done.stdout) == (0, "You said: hi\n"), done.stderr


def test_chat_replaces_bytes_when_they_are_no_utf8(server: DryServer) -> None:
    command = [sys.executable, "-m", "mini_infer_operator.cli", "chat", "--url", server.url]
    done = subprocess.run(command, input=b"caf\xe9\n", capture_output=True, env=environment(), timeout=60)
    assert (done.returncode, done.stdout) == (0, "You said: caf\ufffd\n".encode()), done.stderr


def test_chat_reports_when_the_server_is_not_openai_compatible(capsys: pytest.CaptureFixture[str]) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.handle_request, daemon=True).start()
    assert chat.chat(f"http://127.0.0.1:{server.server_port}", None) == 1
    assert "is --url that of an OpenAI server?" in capsys.readouterr().err
    server.server_close()


def test_chat_looks_for_a_server_at_known_ports(
    server: DryServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    empty = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(server_access, "PLACES", (empty, server.url))
    assert server_access.found_server() == server.url
    monkeypatch.setattr(server_access, "PLACES", (empty,))
    assert chat.chat(None, None) == 1
    assert "mini-infer-serve" in capsys.readouterr().err


@pytest.fixture
def answering() -> Iterator[tuple[str, list[bytes]]]:
    """A server that lists a model, and answers chats with the body put into the list."""
    bodies: list[bytes] = []

    class Odd(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(b'{"data": [{"id": "m"}]}')

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self._answer(bodies[0])

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Odd)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", bodies
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"data: <html>\n\n", "sent an event that is no part of a chat completion: <html>"),
        (b"data: [1]\n\n", "no part of a chat completion"),
        (b'data: {"choices": [1]}\n\n', "no part of a chat completion"),
        (b'data: {"choices": [{"delta": {"content": 5}}]}\n\n', "no part of a chat completion"),
        (b'data: {"choices": [{"del', "no part of a chat completion"),
        (b"data: \xff\x1b[2J\n\n", "no part of a chat completion: \ufffd\u241b[2J"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "no part of a chat completion"),
        (b'data: {"error": "no"}\n\n', "no"),
        (b'data: {"error": {"message": "full"}}\n\n', "full"),
        (b'{"choices": [{"message": {"content": "x"}}]}', "answered without a stream of events"),
        (b"", "answered without a stream of events"),
    ],
)
def test_chat_says_so_when_an_answer_is_no_stream_of_a_chat(
    answering: tuple[str, list[bytes]],
    body: bytes,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, bodies = answering
    bodies.append(body)
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert chat.chat(url, None) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.parametrize(
    "event",
    [b'{"choices": null}', b'{"choices": [{"delta": null}]}', b'{"error": null}', b'{"id": 1}'],
)
def test_chat_goes_on_when_an_event_has_no_text(
    answering: tuple[str, list[bytes]],
    event: bytes,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, bodies = answering
    bodies.append(b"data: " + event + b'\n\ndata: {"choices": [{"delta": {"content": "x"}}]}\n\ndata: [DONE]\n\n')
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert chat.chat(url, None) == 0
    assert capsys.readouterr().out == "x\n"
