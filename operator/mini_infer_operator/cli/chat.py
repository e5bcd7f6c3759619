"""Runs `mini-infer chat`: a small terminal chat with any OpenAI-compatible server. Its memory is in `conversation`."""

import http.client
import io
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from mini_infer_operator.cli.conversation import END_WORDS, GREETING, CommandError, Conversation

PLACES = ("http://127.0.0.1:8080", "http://127.0.0.1:8000")
"""URLs at which a server is looked for: the gateway of `mini-infer up`, then a lone `mini-infer-serve`."""
TIMEOUT_S = 300.0
LOOK_TIMEOUT_S = 5.0
DIM, PLAIN = "\033[2m", "\033[0m"


class ChatError(Exception):
    """Raised if the server cannot be reached or refuses; the message says which."""


class UnreachableError(ChatError):
    """Raised if nothing answers at the address."""


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
        base = _base(url) if url else _found()
        talk = Conversation(model or _only_model(base), system, temperature, thinking)
        if interactive:
            print(f"{talk.model} at {base}. {GREETING}")
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
    except ChatError as error:
        print(f"mini-infer chat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
    return 0


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _found() -> str:
    """Returns OPENAI_BASE_URL if it is set, else the first of the usual places that answers."""
    if url := os.environ.get("OPENAI_BASE_URL"):
        return _base(url)
    for place in PLACES:
        try:
            _open(f"{place}/v1/models", timeout_s=LOOK_TIMEOUT_S).close()
            return place
        except UnreachableError:
            continue
        except ChatError:
            return place  # It is there, and what is wrong is said by the next request.
    places = " nor ".join(PLACES)
    raise ChatError(
        f"nobody answers at {places}: start `mini-infer up` or `mini-infer-serve`, or name a server by --url"
    )


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
                print(f"{'' if thinks else DIM}{thought}", end="", flush=True)
                thinks = True
            if part:
                print(f"{PLAIN}\n" if thinks else "", end="")
                thinks = False
                parts.append(part)
                print(part, end="", flush=True)
    except KeyboardInterrupt:
        print(" (stopped)", end="")
    print(PLAIN if thinks else "")
    return "".join(parts)


def _stream(base: str, body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the pieces of a streamed chat completion: thinking, and text."""
    with _open(f"{base}/v1/chat/completions", json.dumps(body).encode()) as response:
        try:
            for line in response:
                data = line.decode().strip().removeprefix("data:").strip()
                if not line.startswith(b"data:") or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise ChatError(str(event["error"].get("message", event["error"])))
                for choice in event.get("choices", ()):
                    delta = choice.get("delta", {})
                    yield delta.get("reasoning") or delta.get("reasoning_content") or "", delta.get("content") or ""
        except (http.client.HTTPException, OSError) as error:
            raise ChatError(f"the answer broke off: {error}") from error


def _only_model(base: str) -> str:
    with _open(f"{base}/v1/models") as response:
        try:
            names = [str(model["id"]) for model in json.load(response)["data"]]
        except (ValueError, KeyError, TypeError):
            raise ChatError(f"{base}/v1/models is no list of models: is --url that of an OpenAI server?") from None
    if not names:
        raise ChatError(f"no model is ready yet at {base}: engines are loading, `mini-infer status` shows them")
    if len(names) > 1:
        raise ChatError(f"{base} serves {', '.join(names)}: choose one with --model")
    return names[0]


def _open(url: str, body: bytes | None = None, timeout_s: float = TIMEOUT_S) -> Any:
    headers = {"content-type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    try:
        return _opener(url).open(urllib.request.Request(url, body, headers), timeout=timeout_s)
    except urllib.error.HTTPError as error:
        try:
            message = json.load(error)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = error.reason
        raise ChatError(f"{url} answered {error.code}: {message}") from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise UnreachableError(
            f"cannot reach {url} ({reason}): is `mini-infer up` or `mini-infer-serve` running? --url says where"
        ) from error


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Returns an opener that uses the proxy named by the environment, but no proxy for this machine itself."""
    host = urlsplit(url).hostname or ""
    try:
        is_here = ip_address(host).is_loopback
    except ValueError:
        is_here = host == "localhost"
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_here else []))
