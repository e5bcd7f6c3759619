"""The tables "field, here, vLLM, OpenAI" of docs/api.md: `python scripts/field_docs.py` writes them again.

Out of the dialects' own lists of fields, those of the peers (tests/conformance/fields/peer_fields.json), and what the
judges say (tests/conformance/*/expected.yaml).
"""

import json
import sys
import types
import typing
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from mini_infer_apis.dialects.anthropic_request import MessagesRequest  # noqa: E402 - the path is set above
from mini_infer_engine.api.dialects.openai.chat import ChatRequest  # noqa: E402 - the path is set above
from mini_infer_engine.api.dialects.openai.completions import CompletionRequest  # noqa: E402 - the path is set above
from mini_infer_engine.api.dialects.responses.responses_api import ResponsesRequest  # noqa: E402 - the path is set above

PAGE = ROOT / "docs" / "api.md"
BEGIN, END = "<!-- made by scripts/field_docs.py -->", "<!-- end of what scripts/field_docs.py made -->"
CONFORMANCE = ROOT / "tests" / "conformance"
WORKS, NO_EFFECT, REFUSED = "works", "no effect", "400"
WITHOUT_EFFECT = {
    "chat": {"user", "metadata", "session_id", "safety_identifier", "prompt_cache_key"},
    "completions": {"user", "metadata", "session_id"},
    "responses": {"max_tool_calls", "user", "safety_identifier", "prompt_cache_key", "client_metadata", "session_id"},
    "messages": {"metadata", "service_tier", "cache_control"},
}
_TITLES = {
    "chat": ("Chat completions", "openai"),
    "completions": ("Completions", "openai"),
    "responses": ("Responses", "openai"),
    "messages": ("Messages", "anthropic"),
}
_NAMES = {"openai": "OpenAI", "anthropic": "Anthropic"}


def section() -> str:
    """All between the two marks."""
    peers = json.loads((CONFORMANCE / "fields" / "peer_fields.json").read_text())
    versions = peers["versions"]
    head = [
        "## Field by field, beside vLLM and the APIs' owners",
        "",
        f"vLLM {versions['vllm']} by its source, OpenAI and Anthropic by their clients ({versions['openai']}, "
        f"{versions['anthropic']}). Here: *works*; *no effect*; *only* at a value that asks for nothing special; or a "
        "400 that names the field. vLLM ignores what it does not know.",
        "",
        *_judges(),
    ]
    tables = [line for kind in _TITLES for line in table(kind, peers)]
    return "\n".join([BEGIN, *head, *tables, END])


def table(kind: str, peers: dict[str, Any]) -> list[str]:
    """The lines of one API's table."""
    title, owner = _TITLES[kind]
    ours, vllm, owners = here(kind), set(peers["vllm"][kind]), set(peers[owner][kind])
    lines = ["", f"### {title}, field by field", "", f"| field | here | vLLM | {_NAMES[owner]} |", "|---|---|---|---|"]
    for name in sorted({*ours, *vllm, *owners}):
        theirs = "known" if name in vllm else "ignored"
        lines.append(f"| {name} | {ours.get(name, REFUSED)} | {theirs} | {'yes' if name in owners else '-'} |")
    return lines


def here(kind: str) -> dict[str, str]:
    """What this server does with each field that it knows."""
    if kind == "messages":
        fields = {
            field.name: REFUSED if field.type is types.NoneType else _of_messages(field)
            for field in msgspec.structs.fields(MessagesRequest)
        }
    else:
        request = {"chat": ChatRequest, "completions": CompletionRequest, "responses": ResponsesRequest}[kind]
        fields = dict.fromkeys(request.__struct_fields__, WORKS)
        fields |= {name: _only(values) for name, values in request.neutral.items()}
    return fields | {name: NO_EFFECT for name in WITHOUT_EFFECT[kind] if name in fields}


def _of_messages(field: msgspec.structs.FieldInfo) -> str:
    literals = [part for part in typing.get_args(field.type) if typing.get_origin(part) is typing.Literal]
    values = typing.get_args(literals[0]) if literals else ()
    return _only(values) if len(values) == 1 else WORKS


def _only(values: tuple[Any, ...]) -> str:
    distinct = list(dict.fromkeys(json.dumps(value) for value in values if not isinstance(value, float)))
    return f"only {' '.join(distinct)}" if distinct else REFUSED


def _judges() -> list[str]:
    verdicts = yaml.safe_load((CONFORMANCE / "vllm_tests" / "expected.yaml").read_text())
    words = Counter(v if isinstance(v, str) else next(iter(v)) for tests in verdicts.values() for v in tests.values())
    clients = yaml.safe_load((CONFORMANCE / "clients" / "expected.yaml").read_text())
    seen = ", ".join(f"{words[word]} {word}" for word in sorted(words, key=lambda word: (word != "pass", word)))
    checks = ", ".join(f"{name} {len(rows)}" for name, rows in clients.items())
    return [
        f"What the [judges](../tests/conformance/README.md) see: of vLLM's own server tests, {seen}; checks with real "
        f"clients: {sum(map(len, clients.values()))} ({checks}).",
    ]


def written(page: str) -> str:
    """The page with its section as it should be."""
    before, rest = page.split(BEGIN)
    return before + section() + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
