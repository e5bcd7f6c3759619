"""Makes golden_stream.json: a streamed chat as vLLM sends it, by its own classes.

    python tests/gateway/fleet/make_golden_stream.py 0.26.0=SOURCES

SOURCES is the folder of that version's sources. The classes of its protocol are cut out of them and executed as they
are; the order of the events is that of its chat_completion/serving.py. Needs pydantic.
"""

import ast
import json
import sys
import time
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import pydantic

GOLDEN = Path(__file__).parent / "golden_stream.json"
FILES = ("engine/protocol.py", "chat_completion/protocol.py")
ROOT = "ChatCompletionStreamResponse"


def classes(folder: Path) -> dict[str, Any]:
    """The class of a stream's events, and those that it needs, by name."""
    nodes: dict[str, ast.ClassDef] = {}
    for name in FILES:
        tree = ast.parse((folder / "vllm/entrypoints/openai" / name).read_text())
        nodes |= {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    needed: dict[str, ast.ClassDef] = {}

    def need(name: str) -> None:
        if name not in nodes or name in needed:
            return
        for part in ast.walk(nodes[name]):
            if isinstance(part, ast.Name) and part.id != name:
                need(part.id)
        needed[name] = nodes[name]

    need(ROOT)
    names = (
        "BaseModel",
        "ConfigDict",
        "Field",
        "model_serializer",
        "model_validator",
        "field_validator",
        "PrivateAttr",
    )
    scope: dict[str, Any] = {name: getattr(pydantic, name) for name in names}
    scope |= {"time": time, "Any": Any, "ClassVar": ClassVar}
    scope |= {"Literal": Literal, "TypeAlias": TypeAlias, "random_uuid": lambda: "0" * 32}
    scope |= {"make_tool_call_id": lambda *_: "call", "logger": None, "__name__": "golden"}
    exec(compile(ast.Module(list(needed.values()), []), ROOT, "exec"), scope)
    return scope


def stream(found: dict[str, Any]) -> list[str]:
    """An answer of three pieces, and its usage."""

    def event(choices: list[Any], **more: Any) -> str:
        made = found[ROOT](id="chatcmpl-1", created=1764000000, model="m", choices=choices, **more)
        return f"data: {made.model_dump_json(exclude_unset=True)}\n\n"

    def choice(finish: str | None = None, **delta: Any) -> Any:
        message = found["DeltaMessage"](**delta)
        return found["ChatCompletionResponseStreamChoice"](
            index=0, delta=message, logprobs=None, finish_reason=finish, **({"stop_reason": None} if finish else {})
        )

    usage = found["UsageInfo"](prompt_tokens=33, completion_tokens=3, total_tokens=36)
    return [
        event([choice(role="assistant", content="")]),
        *(event([choice(content=text)]) for text in ("It", ' "is" ', "é\n")),
        event([choice("stop", content="")]),
        event([], usage=usage),
        "data: [DONE]\n\n",
    ]


def main() -> None:
    """Writes the file."""
    named = dict(argument.split("=", 1) for argument in sys.argv[1:])
    found = {version: stream(classes(Path(folder))) for version, folder in named.items()}
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
