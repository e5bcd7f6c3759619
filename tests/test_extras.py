"""What an extra installs is what its package imports: no more, no less."""

import ast
import re
import sys
import tomllib

import pytest

from tests.support.checkout import LIBRARIES, PARTS, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {
    "huggingface-hub": "huggingface_hub",
    "pillow": "PIL",
    "prometheus-client": "prometheus_client",
    "pyzmq": "zmq",
    "pyyaml": "yaml",
}
INDIRECT = {
    "fastapi_offline": "the files of Swagger UI, found by name in web/api_docs.py",
    "httptools": "uvicorn parses HTTP with it",
    "protobuf": "transformers reads tokenizer.model with it",
    "sentencepiece": "transformers reads tokenizer.model with it",
    "tiktoken": "transformers reads files of tiktoken's form with it",
    "uvloop": "uvicorn's event loop, by name",
    "websockets": "uvicorn's WebSockets, by name",
}
OPTIONAL = {
    "flash_attn": "an extra of its own",
    "matplotlib": "for pictures of mini-infer-compare, which says so where it is missing",
    "triton": "comes with torch for a GPU",
}
BROUGHT_BY = {"starlette": "fastapi", "pydantic_core": "pydantic"}
OF_USERS = {"PIL", "aiohttp", "httptools", "kubernetes", "uvicorn", "uvloop", "websockets", "zmq", "zstandard"}
"""Imported in libraries for those of their users that declare it."""


def declared(extra: str | None) -> set[str]:
    """Import names of the packages that a part may use: its extra's and everybody's."""
    names = PROJECT["dependencies"] + (PROJECT["optional-dependencies"][extra] if extra else [])
    packages = {re.split(r"[\[<>=!;~ ]", name)[0] for name in names}
    return {MODULES.get(package, package.replace("-", "_")) for package in packages}


def _names(node: ast.AST) -> list[str]:
    """Top-level modules of an import statement; nothing of other nodes."""
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    return [(node.module or "").partition(".")[0]] if isinstance(node, ast.ImportFrom) else []


def imported(part: str) -> set[str]:
    """Top-level modules that a part's files import, at the top or later."""
    folder = ROOT / part / f"mini_infer_{part}"
    found = {
        name for path in folder.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())) for name in _names(node)
    }
    own = {f"mini_infer_{name}" for name in PARTS}
    return found - own - sys.stdlib_module_names - set(OPTIONAL)


@pytest.mark.parametrize(("part", "extra"), [(n, None if n in LIBRARIES else n) for n in PARTS])
def test_each_package_imports_only_its_declared_dependencies(part: str, extra: str | None) -> None:
    missing = {BROUGHT_BY.get(name, name) for name in imported(part)} - declared(extra)
    if part in LIBRARIES:
        missing -= OF_USERS
    assert missing == set()
    if extra is not None:
        unused = declared(extra) - declared(None) - imported(part) - set(INDIRECT)
        unused -= {name for library in LIBRARIES for name in imported(library)}
        assert unused == set()
