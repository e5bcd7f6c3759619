"""Writes peer_fields.json: the request fields of vLLM's source package and of the newest openai and anthropic clients.

`python -m tests.conformance.fields.extract`. Names only; the table in docs/api.md is made of them.
"""

import ast
import json
import subprocess
from pathlib import Path

from tests.conformance import environments

TARGET = Path(__file__).parent / "peer_fields.json"
VLLM = "0.26.0"
_PROTOCOLS = {
    "chat": ("openai/chat_completion/protocol.py", "ChatCompletionRequest"),
    "completions": ("openai/completion/protocol.py", "CompletionRequest"),
    "responses": ("openai/responses/protocol.py", "ResponsesRequest"),
    "messages": ("anthropic/protocol.py", "AnthropicMessagesRequest"),
}
_OPENAI_PARAMETERS = """
import json, typing
from openai.types.chat import completion_create_params as chat
from openai.types import completion_create_params as completions
from openai.types.responses import response_create_params as responses
kinds = {
    "chat": chat.CompletionCreateParamsStreaming,
    "completions": completions.CompletionCreateParamsStreaming,
    "responses": responses.ResponseCreateParamsStreaming,
}
print(json.dumps({kind: sorted(typing.get_type_hints(params)) for kind, params in kinds.items()}))
"""
_ANTHROPIC_PARAMETERS = """
import json, typing
from anthropic.types import message_create_params as plain
from anthropic.types.beta import message_create_params as beta
fields = {*typing.get_type_hints(plain.MessageCreateParamsStreaming)}
fields |= {*typing.get_type_hints(beta.MessageCreateParamsStreaming)} - {"betas"}
print(json.dumps({"messages": sorted(fields)}))
"""


def main() -> None:
    """Extract and write."""
    sources = environments.source_package(f"vllm=={VLLM}") / "vllm" / "entrypoints"
    fields = {
        "vllm": {kind: class_fields(sources / path, name) for kind, (path, name) in _PROTOCOLS.items()},
        "openai": _parameters("openai-python", _OPENAI_PARAMETERS),
        "anthropic": _parameters("anthropic", _ANTHROPIC_PARAMETERS),
    }
    versions = {
        "vllm": VLLM,
        "openai": environments.versions("openai-python")["openai"],
        "anthropic": environments.versions("anthropic")["anthropic"],
    }
    TARGET.write_text(json.dumps({"versions": versions} | fields, indent=1) + "\n")


def class_fields(path: Path, name: str) -> list[str]:
    """Annotated names in the body of a class and of those bases of it that the same file has."""
    classes = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}
    own = classes[name]
    bases = [base.id for base in own.bases if isinstance(base, ast.Name) and base.id in classes]
    annotated = [item.target.id for item in own.body if isinstance(item, ast.AnnAssign) and _is_field(item)]
    return sorted({*annotated, *(field for base in bases for field in class_fields(path, base))})


def _is_field(item: ast.AnnAssign) -> bool:
    is_public = isinstance(item.target, ast.Name) and not item.target.id.startswith("_")
    return is_public and "ClassVar" not in ast.unparse(item)


def _parameters(environment: str, code: str) -> dict[str, list[str]]:
    command = [environments.python_environment(environment), "-c", code]
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=environments.clean_environment())
    found: dict[str, list[str]] = json.loads(out.stdout)
    return found


if __name__ == "__main__":
    main()
