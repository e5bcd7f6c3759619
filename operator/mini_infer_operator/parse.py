"""Parses what a user wrote into a checked InferenceService; every error names the field's path."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import yaml
from pydantic import ValidationError

from mini_infer_operator.resource import (
    GROUP,
    KIND,
    PRESET_KIND,
    VERSION,
    InferencePreset,
    InferenceService,
    Metadata,
    Reason,
)

MOST_PARSED = 256
"""Services that stay parsed: the operator looks at one several times while its engines start."""
_READ_METADATA = {field.alias for field in Metadata.model_fields.values()}


class InvalidServiceError(ValueError):
    """Raised if a document is not an InferenceService that could be served; the message has a line for each fault."""

    reason = Reason.INVALID_SPEC
    """The reason of the conditions."""


class _Loader(yaml.SafeLoader):
    """YAML as kubectl reads it: times stay text, y and n are booleans, and a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Rejects a key that occurs twice, as kubectl does."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^[yYnN]$"), list("yYnN"))
_Loader.bool_values = yaml.SafeLoader.bool_values | {"y": True, "n": False}


def read_file(path: Path) -> list[dict[str, Any]]:
    """Reads the InferenceServices of a YAML or JSON file, unchecked. Raises InvalidServiceError if it has none."""
    documents = _documents(path)
    services = [d for d in documents if isinstance(d, dict) and d.get("kind") == KIND]
    if not services:
        kinds = ", ".join(str(d.get("kind")) if isinstance(d, dict) else type(d).__name__ for d in documents)
        raise InvalidServiceError(
            f"{path} holds no {KIND} ({kinds or 'it is empty'}): it starts with "
            f"`apiVersion: {GROUP}/{VERSION}` and `kind: {KIND}`"
        )
    return services


def read_presets(path: Path) -> list[dict[str, Any]]:
    """Reads and checks the InferencePresets of a YAML or JSON file, or of all such files of a folder.

    Raises InvalidServiceError with every fault found.
    """
    paths = sorted(p for p in path.iterdir() if p.suffix in {".yaml", ".yml", ".json"}) if path.is_dir() else [path]
    found = [d for each in paths for d in _documents(each) if isinstance(d, dict) and d.get("kind") == PRESET_KIND]
    for document in found:
        try:
            parse_preset(document)
        except InvalidServiceError as error:
            raise InvalidServiceError(f"{PRESET_KIND}: {error}") from error
    return found


def _documents(path: Path) -> list[Any]:
    try:
        return [document for document in yaml.load_all(path.read_text(), Loader=_Loader) if document is not None]
    except OSError as error:
        raise InvalidServiceError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InvalidServiceError(f"{path} is not YAML: {error}") from error


def parse_service(document: Mapping[str, Any]) -> InferenceService:
    """Checks one document as the API server would. Raises InvalidServiceError with every fault found."""
    read, metadata = {key: value for key, value in document.items() if key != "status"}, document.get("metadata")
    if isinstance(metadata, Mapping):  # the rest of it changes with each write of the status
        read["metadata"] = {key: value for key, value in metadata.items() if key in _READ_METADATA}
    try:
        try:
            return _checked(_Document(msgspec.msgpack.encode(read), read))
        except (TypeError, OverflowError, RecursionError, UnicodeEncodeError):  # JSON has no such values, a file may
            return InferenceService.model_validate(read)
    except ValidationError as error:
        raise InvalidServiceError("\n".join(_sentence(dict(fault)) for fault in error.errors())) from error


@dataclass(frozen=True, slots=True)
class _Document:
    """A document that equals another one with the same content."""

    content: bytes
    """MessagePack, which tells 1 from 1.0 and null from NaN."""
    document: Mapping[str, Any] = field(compare=False)


@lru_cache(maxsize=MOST_PARSED)
def _checked(document: _Document) -> InferenceService:
    return InferenceService.model_validate(document.document)


def parse_preset(document: Mapping[str, Any]) -> InferencePreset:
    """Checks one preset as the API server would. Raises InvalidServiceError with every fault found."""
    try:
        return InferencePreset.model_validate(document)
    except ValidationError as error:
        raise InvalidServiceError("\n".join(_sentence(dict(fault)) for fault in error.errors())) from error


def _sentence(fault: dict[str, Any]) -> str:
    """Returns one of pydantic's errors as a line: `spec.unified.replicas: ...`."""
    names = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"] if part not in _UNION_ARMS]
    path = "".join(names).lstrip(".") or "the document"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        message = "there is no such field"
    elif fault["type"] == "missing":
        message = "is missing"
    elif fault["type"] != "value_error":
        message += f", not {json.dumps(fault['input'], default=str)[:80]}"
    return f"{path}: {message}"


_UNION_ARMS = {"int", "str", "function-after[_checked_quantity(), union[int,str]]"}
"""pydantic puts the tried types of `int or str` into the path; no field is called so."""
