"""Builds grammars of structural tags: free text in which certain tags have contents of a given form.

It accepts both shapes of vLLM: `structures` with `triggers`, and `format`, a tree after xgrammar's structural_tag.py
(https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html). Unknown parts are rejected by name.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mini_infer_engine.structured.grammar import (
    ANY_WHITESPACE,
    TEXT,
    Grammar,
    Whitespace,
    literal,
    of_json_schema,
    of_lark,
    of_lark_or_gbnf,
    of_regex,
)
from mini_infer_engine.structured.limits import GrammarError, check_json_depth, check_literal

Format = Mapping[str, Any]


def of_structural_tag(tag: object, whitespace: Whitespace = ANY_WHITESPACE) -> Grammar:
    """Returns the grammar of a structural tag in either shape. Raises GrammarError, with the place of the fault."""
    if not isinstance(tag, Mapping):
        raise GrammarError("a structural tag is an object")
    check_json_depth(tag, "structural tag")
    _check_literals(tag)
    if "structures" in tag:
        return _Builder(whitespace).grammar(_from_structures(tag))
    return _Builder(whitespace).grammar(_field(tag, "format", Mapping, ""))


def _from_structures(tag: Format) -> Format:
    """Converts the older shape to a tree: free text, in which triggers begin structures."""
    tags = [
        {
            "type": "tag",
            "begin": _field(structure, "begin", str, f"structures[{index}]"),
            "content": {"type": "json_schema", "json_schema": structure.get("schema") or {}},
            "end": _field(structure, "end", str, f"structures[{index}]"),
        }
        for index, structure in enumerate(_field(tag, "structures", list, ""))
    ]
    return {"type": "triggered_tags", "triggers": _field(tag, "triggers", list, ""), "tags": tags}


class _Builder:
    """One grammar in the making: rules of Lark so far, and the grammars that they refer to."""

    def __init__(self, whitespace: Whitespace) -> None:
        self._whitespace = whitespace
        self._rules: list[str] = []
        self._inner: dict[str, Grammar] = {}
        self._makers: dict[str, Callable[[Format, str], str]] = {
            "const_string": lambda node, at: literal(_field(node, "value", str, at)),
            "json_schema": self._json_schema,
            "regex": lambda node, at: self._refer(of_regex(_field(node, "pattern", str, at))),
            "grammar": lambda node, at: self._refer(of_lark_or_gbnf(_field(node, "grammar", str, at))),
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": lambda node, at: " | ".join(self._elements(node, at)),
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
            "optional": lambda node, at: f"({self._content(node, at)})?",
            "plus": lambda node, at: f"({self._content(node, at)})+",
            "star": lambda node, at: f"({self._content(node, at)})*",
            "repeat": self._repeat,
        }

    def grammar(self, tree: Format) -> Grammar:
        """Returns the whole grammar."""
        start = self._expression(tree, "format")
        return of_lark("\n".join([f"start: {start}", *self._rules, f"TEXT: {TEXT}"]), **self._inner)

    def _expression(self, node: object, at: str) -> str:
        """Returns the right side of a rule for a node of the tree; `at` says where it stands."""
        if not isinstance(node, Mapping):
            raise GrammarError(f"{at} is no object")
        kind = node.get("type")
        maker = self._makers.get(kind) if isinstance(kind, str) else None
        if maker is None:
            raise GrammarError(f"{at}.type is {kind!r}: known are {', '.join(self._makers)}")
        return maker(node, at)

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def _refer(self, grammar: Grammar) -> str:
        keyword = f"inner{len(self._inner)}"
        self._inner[keyword] = grammar
        return f"@{keyword}"

    def _json_schema(self, node: Format, at: str) -> str:
        if node.get("style", "json") != "json":
            raise GrammarError(f"{at}.style is {node['style']!r}: only json is known")
        schema = node.get("json_schema")
        if not isinstance(schema, Mapping | bool):
            raise GrammarError(f"{at}.json_schema is no schema")
        return self._refer(of_json_schema(schema, whitespace=self._whitespace))

    def _any_text(self, node: Format, at: str, end: Sequence[str] = ()) -> str:
        """Matches free text without the strings in `excludes`, up to and including one of `end`."""
        excludes = [literal(text) for text in _strings(node, "excludes", at, default=[])]
        terminal = "TEXT"
        if excludes:
            terminal = f"T{len(self._rules)}"
            banned = " | ".join(f"(TEXT {text} TEXT)" for text in excludes)
            self._rules.append(f"{terminal}: TEXT & ~({banned})")
        if not end:
            return terminal
        return "(" + " | ".join(self._rule(f"{terminal} {literal(text)}", "[lazy]") for text in end) + ")"

    def _sequence(self, node: Format, at: str) -> str:
        """Matches the elements in sequence. Free text ends at the constant that follows it, or with the output."""
        elements = _field(node, "elements", list, at)
        parts, index = [], 0
        while index < len(elements):
            element, where = elements[index], f"{at}.elements[{index}]"
            following = elements[index + 1] if index + 1 < len(elements) else None
            if not _is_text(element) or following is None:
                parts.append(f"({self._expression(element, where)})")
            elif isinstance(following, Mapping) and following.get("type") == "const_string":
                parts.append(self._any_text(element, where, [_field(following, "value", str, where)]))
                index += 1
            else:
                raise GrammarError(f"{where}: any_text must be the last element, or a const_string must follow it")
            index += 1
        return " ".join(parts) or '""'

    def _tag(self, node: Format, at: str) -> str:
        begin = literal(_field(node, "begin", str, at))
        return f"{begin} {self._tag_body(node, at)}"

    def _tag_body(self, node: Format, at: str) -> str:
        """Matches content and end of a tag."""
        ends = [node["end"]] if isinstance(node.get("end"), str) else _strings(node, "end", at)
        content = node.get("content")
        if isinstance(content, Mapping) and _is_text(content) and all(ends):
            return self._any_text(content, f"{at}.content", ends)
        inside = self._expression(content, f"{at}.content")
        return f"({inside}) ({' | '.join(map(literal, ends))})"

    def _triggered_tags(self, node: Format, at: str) -> str:
        """Matches free text; a trigger in it begins one of the tags that begin with it."""
        triggers = _strings(node, "triggers", at)
        by_trigger: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for index, tag in enumerate(self._tags(node, at)):
            where = f"{at}.tags[{index}]"
            begin = _field(tag, "begin", str, where)
            trigger = next((trigger for trigger in triggers if trigger and begin.startswith(trigger)), None)
            if trigger is None:
                raise GrammarError(f"{where}.begin is {begin!r}, which begins with none of the triggers {triggers!r}")
            by_trigger[trigger].append(f"{literal(begin[len(trigger) :])} {self._tag_body(tag, where)}")
        text = self._any_text(node, at)
        options = [
            f"{self._rule(f'{text} {literal(trigger)}', '[lazy]')} ({' | '.join(bodies)})"
            for trigger, bodies in by_trigger.items()
            if bodies
        ]
        tag_rule = self._rule(" | ".join(options))
        if node.get("stop_after_first"):
            return tag_rule if node.get("at_least_one") else f"({tag_rule} | {text})"
        return f"{tag_rule}{'+' if node.get('at_least_one') else '*'} {text}"

    def _tags_with_separator(self, node: Format, at: str) -> str:
        """Matches tags alone, with a separator between two."""
        tags = self._tags(node, at)
        options = " | ".join(self._tag(tag, f"{at}.tags[{index}]") for index, tag in enumerate(tags))
        one = self._rule(options)
        more = "" if node.get("stop_after_first") else f" ({literal(_field(node, 'separator', str, at))} {one})*"
        return f"{one}{more}" if node.get("at_least_one") else f"({one}{more})?"

    def _repeat(self, node: Format, at: str) -> str:
        low, high = _field(node, "min", int, at), _field(node, "max", int, at)
        if low < 0 or (high != -1 and high < low):
            raise GrammarError(f"{at} repeats from {low} to {high} times: write 0 <= min <= max, or max = -1")
        return f"({self._content(node, at)}){{{low},{'' if high == -1 else high}}}"

    def _elements(self, node: Format, at: str) -> list[str]:
        elements = _field(node, "elements", list, at)
        if not elements:
            raise GrammarError(f"{at}.elements is empty")
        return [f"({self._expression(item, f'{at}.elements[{index}]')})" for index, item in enumerate(elements)]

    def _content(self, node: Format, at: str) -> str:
        return self._expression(node.get("content"), f"{at}.content")

    def _tags(self, node: Format, at: str) -> list[Format]:
        tags: list[Format] = _field(node, "tags", list, at)
        if not tags or not all(isinstance(tag, Mapping) for tag in tags):
            raise GrammarError(f"{at}.tags must hold at least one tag, and tags alone")
        return tags


def _check_literals(tag: Format) -> None:
    """Raises GrammarError if a text in the tag is too long; schemas in it have checks of their own."""
    pending: list[tuple[str, object]] = [("the structural tag", tag)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, str) and name != "grammar":
            check_literal(value, f"{name} of a structural tag")
        elif isinstance(value, Mapping):
            pending += ((key, inner) for key, inner in value.items() if key not in ("json_schema", "schema"))
        elif isinstance(value, list):
            pending += ((name, inner) for inner in value)


def _is_text(node: object) -> bool:
    return isinstance(node, Mapping) and node.get("type") == "any_text"


def _field(node: object, name: str, kind: type, at: str) -> Any:
    """Returns a part of a node. Raises GrammarError if it is missing, or of another type."""
    value = node.get(name) if isinstance(node, Mapping) else None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        where = f"{at}.{name}" if at else name
        raise GrammarError(f"{where} is missing, or no {_NAMES.get(kind, 'object')}")
    return value


_NAMES = {str: "string", list: "list", int: "integer"}


def _strings(node: Format, name: str, at: str, default: list[str] | None = None) -> list[str]:
    found = node.get(name, default)
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise GrammarError(f"{at}.{name} must be a list of strings")
    return found
