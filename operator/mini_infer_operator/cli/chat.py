"""`mini-infer chat`: a small terminal chat with any OpenAI-compatible server. Standard library only."""

import http.client
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

HELP = "Type a message. /reset forgets the conversation, /quit (or Ctrl-D) ends. Ctrl-C stops an answer."
TIMEOUT_S = 300.0

Message = dict[str, str]


class ChatError(Exception):
    """The server cannot be reached or refused; the message says which."""


def chat(url: str, model: str | None) -> int:
    """Talk until the input ends; the exit code."""
    base = url.rstrip("/").removesuffix("/v1")
    interactive = sys.stdin.isatty()
    try:
        model = model or _only_model(base)
        if interactive:
            print(f"{model} at {base}. {HELP}")
        messages: list[Message] = []
        for text in _inputs(interactive=interactive):
            if text in {"/quit", "/exit"}:
                break
            if text == "/reset":
                messages = []
                if interactive:
                    print("(forgotten)")
                continue
            messages.append({"role": "user", "content": text})
            answer = _print_answer(base, model, messages)
            messages.append({"role": "assistant", "content": answer})
    except ChatError as error:
        print(f"mini-infer chat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
    return 0


def _inputs(*, interactive: bool) -> Iterator[str]:
    """Each message of the user: a line of a terminal, or the whole of what is piped in, line by line."""
    while True:
        try:
            text = input("\n> " if interactive else "").strip()
        except EOFError:
            if interactive:
                print()
            return
        if text:
            yield text


def _print_answer(base: str, model: str, messages: list[Message]) -> str:
    """Stream the answer to standard output; what came before Ctrl-C counts as the answer."""
    parts: list[str] = []
    try:
        for part in _stream(base, {"model": model, "messages": messages, "stream": True}):
            parts.append(part)
            print(part, end="", flush=True)
    except KeyboardInterrupt:
        print(" (stopped)", end="")
    print()
    return "".join(parts)


def _stream(base: str, body: dict[str, Any]) -> Iterator[str]:
    """The pieces of text of a streamed chat completion."""
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
                    yield choice.get("delta", {}).get("content") or ""
        except (http.client.HTTPException, OSError) as error:
            raise ChatError(f"the answer broke off: {error}") from error


def _only_model(base: str) -> str:
    with _open(f"{base}/v1/models") as response:
        names = [str(model["id"]) for model in json.load(response)["data"]]
    if not names:
        raise ChatError(f"{base} has no model that is ready: try again shortly")
    if len(names) > 1:
        raise ChatError(f"{base} serves {', '.join(names)}: choose one with --model")
    return names[0]


def _open(url: str, body: bytes | None = None) -> Any:
    headers = {"content-type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    try:
        return urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        try:
            message = json.load(error)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = error.reason
        raise ChatError(f"{url} answered {error.code}: {message}") from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ChatError(f"cannot reach {url} ({reason}): is `mini-infer up` running? --url says where") from error
