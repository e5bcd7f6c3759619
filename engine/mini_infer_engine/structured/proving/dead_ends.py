"""Detects objects of a schema that allow a comma after which no name can follow: the library notices that too late.

It happens where `patternProperties` match only names that `properties` has already, and no others are allowed.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from mini_infer_engine.structured.parser_limits import parser_limits

DEAD_END = (
    "some outputs that it allows cannot be completed, as where patternProperties match no other names than properties "
    "does: leave out what nothing can match"
)
_DEAD_END = "NoExtensionBias"


def is_dead_end(output: LLMatcher) -> bool:
    """Returns True if `compute_bitmask` has found that nothing can follow the output."""
    return _DEAD_END in output.stop_reason() or _DEAD_END in output.get_error()


def has_dead_pattern(tokenizer: LLTokenizer, text: str) -> bool:
    """Returns True if an object in one of the grammar's schemas has such `patternProperties`."""
    if '"patternProperties"' not in text:
        return False
    return any(_ends_behind_comma(tokenizer, item) for item in _objects(json.loads(text)))


def _objects(document: Any) -> Iterator[Mapping[str, Any]]:
    pending = [document]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending += item
        elif isinstance(item, dict):
            pending += item.values()
            item = _merged(item)
            if isinstance(item.get("patternProperties"), dict) and isinstance(item.get("properties", {}), dict):
                yield item


def _merged(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the object schema that the parts of an `allOf` form together, as far as its names go."""
    members = schema.get("allOf")
    if not isinstance(members, list):
        return schema
    parts = [part for part in (schema, *members) if isinstance(part, dict)]
    merged: dict[str, Any] = {
        "additionalProperties": all(part.get("additionalProperties") is not False for part in parts)
    }
    for keyword in ("properties", "patternProperties"):
        found = [part[keyword] for part in parts if isinstance(part.get(keyword), dict)]
        if found:
            merged[keyword] = {name: inner for table in found for name, inner in table.items()}
    return merged


def _ends_behind_comma(tokenizer: LLTokenizer, item: Mapping[str, Any]) -> bool:
    """Tests an object with the same names, all present: returns True if nothing can follow the comma after the last
    one.
    """
    names = [name for name, schema in item.get("properties", {}).items() if schema is not False]
    others = item.get("additionalProperties", True)
    schema = {
        "type": "object",
        "properties": {name: {} for name in names},
        "patternProperties": {pattern: schema is not False for pattern, schema in item["patternProperties"].items()},
        "required": names,
        "additionalProperties": others is not False,
        "x-guidance": {"whitespace_flexible": False},
    }
    output = LLMatcher(
        tokenizer, json.dumps({"grammars": [{"json_schema": schema}]}), log_level=0, limits=parser_limits()
    )
    written = ",".join(f"{json.dumps(name, ensure_ascii=False)}:1" for name in names)
    tokens = tokenizer.tokenize_str("{" + written + ("," if names else ""))
    if output.try_consume_tokens(tokens) < len(tokens):
        return False  # the library sees that no comma may follow, or refuses the schema, which is said elsewhere
    output.compute_bitmask()
    return is_dead_end(output)
