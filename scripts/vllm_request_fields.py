"""The fields of vLLM's requests with their defaults, read from its sources without running them.

python scripts/vllm_request_fields.py VLLM_SOURCES VERSION > tests/engine/api/dialects/vllm_fields.json

VLLM_SOURCES is vLLM's source package, unpacked. Fields whose default is made by a function have that function's name.
"""

import ast
import json
import sys
from pathlib import Path
from typing import Any

REQUESTS = {
    "chat": ("chat_completion", "ChatCompletionRequest"),
    "completion": ("completion", "CompletionRequest"),
}


def fields_of(source: str, class_name: str) -> dict[str, Any]:
    """Annotated fields of a pydantic model: name to default; None too where there is none."""
    classes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
    made = next(node for node in classes if node.name == class_name)
    return {
        node.target.id: _default(node.value)
        for node in made.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_")
    }


def _default(value: ast.expr | None) -> Any:
    if not isinstance(value, ast.Call):
        return None if value is None else ast.literal_eval(value)
    named = {keyword.arg: keyword.value for keyword in value.keywords}
    if "default_factory" in named:
        factory = ast.unparse(named["default_factory"])
        return {"list": [], "dict": {}}.get(factory, f"made by {factory}")
    default = value.args[0] if value.args else named.get("default")
    return None if default is None else ast.literal_eval(default)


def main() -> None:
    """Print the list."""
    sources, version = Path(sys.argv[1]), sys.argv[2]
    found: dict[str, Any] = {"version": version}
    for name, (folder, class_name) in REQUESTS.items():
        path = sources / "vllm" / "entrypoints" / "openai" / folder / "protocol.py"
        found[name] = dict(sorted(fields_of(path.read_text(), class_name).items()))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
