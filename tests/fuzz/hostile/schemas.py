"""Hostile structured output: random `$defs` graphs, numbers, patterns, formats, grammars and tools of clients."""

import string
from random import Random
from typing import Any

from tests.fuzz.fleet import Fleet
from tests.fuzz.hostile.load import Findings, post

_FORMATS = ("date-time", "email", "uuid", "uri", "ipv4", "ipv6", "path", "password", "odd", "regex", "duration")
_PATTERNS = (
    "(a{1,1000}){1,1000}", "(a|b|c)*d{5000}", "^(([a-z])+.)+$", "(?=a)b", "a{,}", "[", "(" * 500 + ")" * 500,
    ".*" * 200,
    "\\d{1,9999}", "(?P<x>a)(?P=x)", "[^\\x00-\\uffff]", "^$", "(x+x+)+y", "\\p{L}{400}", "a**", "((((a*)*)*)*)*",
)  # fmt: skip
_GRAMMARS = (
    'root ::= "a" root | "b"',
    "root ::= root",
    "root ::= " + "( " * 800 + '"a"' + " )" * 800,
    "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(3000)) + '\nr3000: "a"',
    "start: /(a{1,500}){1,500}/",
    'start: "a"{1,100000}',
    "start:",
    "?",
)


def schema(random: Random) -> Any:
    """Returns a schema of a random hostile kind."""
    return random.choice((_chain, _graph, _numbers, _wide, _deep, _strings, _applicators, _arrays, _small))(random)


def body(random: Random) -> dict[str, Any]:
    """Returns a chat request that asks for structured output in one of the ways that the API has."""
    request: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Bob is 30 years old. Answer in JSON."}],
        "max_tokens": random.choice((1, 8, 40)),
    }
    draw = random.random()
    if draw < 0.5:
        request["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema(random)}}
    elif draw < 0.65:
        function = {"name": "f", "parameters": schema(random), "strict": random.random() < 0.5}
        request |= {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    elif draw < 0.75:
        request["structured_outputs"] = {"json": schema(random)}
    elif draw < 0.85:
        request["structured_outputs"] = {"regex": random.choice(_PATTERNS)}
    elif draw < 0.95:
        request["structured_outputs"] = {"grammar": random.choice(_GRAMMARS)}
    else:
        request["structured_outputs"] = {"choice": ["a" * random.choice((1, 5000))] * random.choice((1, 3000))}
    return request


async def attack(fleet: Fleet, random: Random, found: Findings) -> None:
    """Sends hostile schemas to both models, one after the other, and counts the statuses."""
    while True:
        request = body(random) | {"model": random.choice(fleet.models)}
        await post(fleet.gateway_url + "/v1/chat/completions", request, found, "schemas")
        await fleet.pause(random, 0.2)


def _chain(random: Random) -> Any:
    count = random.choice((50, 200, 1000, 3000))
    link = random.choice(
        (
            lambda ref: {"type": "object", "properties": {"a": ref}, "required": ["a"]},
            lambda ref: {"type": "array", "items": ref},
            lambda ref: {"anyOf": [ref, {"type": "null"}]},
            lambda ref: {"allOf": [ref]},
            lambda ref: ref,
        )
    )
    definitions = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$defs": definitions | {f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def _graph(random: Random) -> Any:
    count = random.randint(2, 40)

    def node(depth: int) -> Any:
        draw = random.random()
        if depth > 3 or draw < 0.5:
            return {"$ref": f"#/$defs/d{random.randrange(count)}"}
        if draw < 0.7:
            return {"type": "object", "properties": {key: node(depth + 1) for key in random.sample("abcdef", 3)}}
        if draw < 0.85:
            return {"type": "array", "items": node(depth + 1), "minItems": random.choice((0, 1, 10**6))}
        return {random.choice(("anyOf", "oneOf", "allOf")): [node(depth + 1), node(depth + 1)]}

    definitions = {f"d{i}": node(0) for i in range(count)}
    definitions["d0"] = random.choice(({"type": "integer"}, definitions["d0"]))
    return {"$defs": definitions, "type": "object", "properties": {"x": node(0)}, "required": ["x"]}


def _numbers(random: Random) -> Any:
    numbers = (0, 1, -1, 0.1, 7, 9999991, 15485863, 1e30, -1e30, 2**63, 1e-9, 1e308, 3.7)
    keywords = ("multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    chosen = random.sample(keywords, random.randint(1, 4))
    return {"type": random.choice(("integer", "number"))} | {key: random.choice(numbers) for key in chosen}


def _wide(random: Random) -> Any:
    count = random.choice((100, 1000, 5000))
    properties = {f"p{i}": {"type": "string"} for i in range(count)}
    required = list(properties)[: random.choice((0, 1, count))]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _deep(random: Random) -> Any:
    inner: Any = {"type": "string"}
    for _ in range(random.choice((30, 65, 300, 2000))):
        inner = {"type": "object", "properties": {"a": inner}} if random.random() < 0.5 else {"items": inner}
    return inner


def _strings(random: Random) -> Any:
    found: dict[str, Any] = {"type": "string"}
    if random.random() < 0.5:
        found["pattern"] = random.choice(_PATTERNS)
    if random.random() < 0.5:
        found["format"] = random.choice(_FORMATS)
    if random.random() < 0.5:
        found |= {"minLength": random.choice((0, 5, 10**5, 10**9)), "maxLength": random.choice((0, 5, 10**5, 10**9))}
    return {"type": "object", "properties": {"s": found}, "required": ["s"]}


def _applicators(random: Random) -> Any:
    parts = [_small(random) for _ in range(random.choice((2, 10, 300)))]
    key = random.choice(("anyOf", "oneOf", "allOf"))
    return {key: parts, random.choice(("not", "if", "then", "contains", "dependentSchemas")): _small(random)}


def _arrays(random: Random) -> Any:
    bounds = (0, 1, 50, 10**4, 10**9, -1, 0.5)
    return {
        "type": "array",
        "items": _small(random),
        "minItems": random.choice(bounds),
        "maxItems": random.choice(bounds),
        "prefixItems": [_small(random)] * random.choice((0, 1, 200)),
    }


def _small(random: Random) -> Any:
    return random.choice(
        (
            True, False, {}, {"type": "null"}, {"const": "a" * random.choice((1, 9000))}, {"enum": list(range(500))},
            {"type": ["string", "integer"]}, {"type": "odd"}, {"$ref": "#"}, {"$ref": "http://example.com/x"},
            {"patternProperties": {"^a": {"type": "integer"}}, "properties": {"b": {"type": "string"}}},
            {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}, {"format": random.choice(_FORMATS)},
            {"enum": [random.choice(string.printable) for _ in range(50)]}, {"$ref": "#/$defs/nowhere"}, [], 5, None,
        )
    )  # fmt: skip
