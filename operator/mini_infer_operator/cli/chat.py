"""Runs `mini-infer chat`: a small terminal chat with any OpenAI-compatible server. Its memory is in `conversation`."""

import http.client
import io
import json
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from mini_infer_operator.cli.conversation import END_WORDS, GREETING, CommandError, Conversation
from mini_infer_operator.cli.server_access import ServerError, base_url, found_server, open_server
from mini_infer_operator.cli.terminal import printable

_LONGEST_SHOWN = 200
"""Bytes of an unreadable event that an error repeats."""
DIM, PLAIN = "\033[2m", "\033[0m"


def chat(
    url: str | None,
    model: str | None,
    *,
    system: str = "",
    temperature: float | None = None,
    thinking: bool | None = None,
) -> int:
    """Talks until the input ends. Returns the exit code."""
    interactive = sys.stdin.isatty()
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # bytes that are no text become a question mark, not half a character
    try:
        base = base_url(url) if url else found_server()
        talk = Conversation(model or _only_model(base), system, temperature, thinking)
        if interactive:
            print(f"{printable(talk.model)} at {base}. {GREETING}")
        for text in _inputs(interactive=interactive):
            if text in END_WORDS:
                break
            try:
                reply = talk.command(text)
            except CommandError as error:
                print(f"({error})", file=sys.stdout if interactive else sys.stderr)
                continue
            if reply is None:
                talk.send(text)
                talk.answered(_print_answer(base, talk.body()))
            elif interactive or text == "/help":
                print(reply)
    except ServerError as error:
        print(f"mini-infer chat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
    return 0


def _inputs(*, interactive: bool) -> Iterator[str]:
    """Yields each message of the user: the lines of a terminal or of piped input."""
    while True:
        try:
            text = input("\n> " if interactive else "").strip()
        except EOFError:
            if interactive:
                print()
            return
        if text:
            yield text


def _print_answer(base: str, body: dict[str, Any]) -> str:
    """Streams the answer to standard output, thinking in grey; what came before Ctrl-C counts as the answer."""
    parts: list[str] = []
    dim = sys.stdout.isatty()
    thinks = False
    try:
        for thought, part in _stream(base, body):
            if thought and dim:
                print(f"{'' if thinks else DIM}{printable(thought)}", end="", flush=True)
                thinks = True
            if part:
                print(f"{PLAIN}\n" if thinks else "", end="")
                thinks = False
                parts.append(part)
                print(printable(part) if dim else part, end="", flush=True)
    except KeyboardInterrupt:
        print(" (stopped)", end="")
    print(PLAIN if thinks else "")
    return "".join(parts)


def _stream(base: str, body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the pieces of a streamed chat completion: thinking, and text."""
    url, events = f"{base}/v1/chat/completions", 0
    with open_server(url, json.dumps(body).encode()) as response:
        try:
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                events += 1
                event = _event(url, data)
                if event.error is not None:
                    raise ServerError(_message(event.error))
                for choice in event.choices or ():
                    delta = choice.delta or _Delta()
                    yield delta.reasoning or delta.reasoning_content or "", delta.content or ""
        except (http.client.HTTPException, OSError) as error:
            raise ServerError(f"the answer broke off: {error}") from error
    if not events:
        raise ServerError(f"{url} answered without a stream of events: is --url that of an OpenAI server?")


def _event(url: str, data: bytes) -> "_Event":
    try:
        return msgspec.convert(json.loads(data), _Event)  # json: msgspec's reader refuses half of a surrogate pair
    except (ValueError, RecursionError):
        shown = printable(data[:_LONGEST_SHOWN].decode(errors="replace"))
        raise ServerError(f"{url} sent an event that is no part of a chat completion: {shown}") from None


def _message(error: Any) -> str:
    return printable(str(error.get("message", error) if isinstance(error, dict) else error))


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None


class _Event(msgspec.Struct):
    """The fields of an event that are read; others may be anything."""

    choices: list[_Choice] | None = None
    error: Any = None


def _only_model(base: str) -> str:
    with open_server(f"{base}/v1/models") as response:
        try:
            names = [str(model["id"]) for model in json.load(response)["data"]]
        except (ValueError, KeyError, TypeError):
            raise ServerError(f"{base}/v1/models is no list of models: is --url that of an OpenAI server?") from None
    if not names:
        raise ServerError(f"no model is ready yet at {base}: engines are loading, `mini-infer status` shows them")
    if len(names) > 1:
        raise ServerError(f"{base} serves {', '.join(names)}: choose one with --model")
    return names[0]
