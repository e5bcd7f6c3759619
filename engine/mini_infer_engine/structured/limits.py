"""Defines the limits on what a client may have enforced, and checks those that can be seen without compiling.

A grammar that passes these checks but is too large ends a worker (proving/worker.py), whose limits of memory, CPU time
and stack are here as well. Knows no tokenizer; never recurses on a client's input.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

MAX_CHARACTERS = 500_000
"""Most characters of a grammar's text, and of all texts in a request for it: compile time grows with them."""
MAX_JSON_DEPTH = 64
"""Deepest nesting of arrays and objects in the JSON text of a schema or a structural tag."""
MAX_SCHEMA_DEPTH = 128
"""Deepest nesting of schemas, followed through `$ref`; a schema within itself counts once."""
MAX_OPTIONAL_PROPERTIES = 1000
"""Most optional properties of one object: the parser follows all that may come next at once."""
MAX_PROPERTIES = 10_000
"""Most properties of all objects of a schema together."""
MAX_DEFINITIONS = 5000
"""Most schemas in `$defs` and `definitions`."""
MAX_ENUM_VALUES = 20_000
"""Most values of all `enum`s together."""
MAX_MULTIPLE_OF = 10_000
"""Largest number that the digits of `multipleOf` form, without trailing zeros and the point: the automaton has so many
states.
"""
MAX_LITERAL_CHARACTERS = 8192
"""Most characters of one constant text or pattern: each token within it costs time and memory that grow with the rest.
"""
MAX_RULES_CHARACTERS = 65_536
"""Most characters of all constants of a grammar in Lark or GBNF, and of one terminal with those that it refers to: the
library joins neighbours to one constant.
"""
MAX_LONG_CHARACTERS = 32_768
"""Most characters of all those choices, or values of `enum` and `const`, that have more than a thousand characters
each: the lexer follows in parallel those that begin alike.
"""
MAX_RULE_DEPTH = 128
"""Longest chain of rules of Lark or GBNF that refer to each other."""
MAX_RULES = 5000
"""Most rules of one grammar in Lark or GBNF."""

MAX_GRAMMAR_BYTES = 32 << 20
"""Most memory that a worker may take to compile a grammar and compute its first masks: a hundred times what schemas in
use need.
"""
MAX_CPU_S = 1.0
"""Most CPU seconds to compile a grammar and compute its first masks: a hundred times what schemas in use need."""
MAX_WALL_S = 8.0
"""Most seconds of wall time for a proof, on a machine that is busy."""
MAX_MASK_S = 0.1
"""Most CPU seconds of one mask."""
BUILD_TIMEOUT_S = 10.0
"""Seconds until a request's grammar must be checked, including the wait for other grammars of its client."""
MAX_GRAMMARS_PER_CLIENT = 2
"""Most new grammars of one API key, or of one peer without a key, that are checked at once."""
MAX_GRAMMARS_WAITING = 64
"""Most new grammars of one client that wait to be checked; more are refused with 429."""
PROOF_STACK_BYTES = 4 << 20
"""The stack of a worker."""
MAX_KEPT_BYTES = 64 << 20
"""Memory of compiled grammars that the core keeps for later requests; the oldest is evicted first."""
MAX_RUNNING_BYTES = 512 << 20
"""Most memory of the compiled grammars of requests in flight, as measured when they were checked. Requests with the
same grammar share it. A request whose grammar does not fit waits.
"""
SLOW_COMPILE_S = 0.1
"""CPU seconds from which a grammar is compiled in a queue of its own, so that quick ones do not wait for it."""
CORE_STACK_BYTES = 64 << 20
"""Stack of threads that compile grammars and compute masks in the core: sixteen times a worker's, within which the
grammar's recursion was proved to fit.
"""
_LONG_CHARACTERS = 1000
_MOST_DIGITS = 100
"""Most digits of a number that are examined: Python takes quadratic time to read thousands."""


class GrammarError(ValueError):
    """Raised for a schema, regex or grammar that cannot be enforced; the message says what in it is at fault."""


def check_size(*values: object) -> None:
    """Raises GrammarError if the texts in `values` are so long that no grammar made of them can be compiled."""
    length, level = 0, list(values)
    while level:
        length += sum(len(item) for item in level if isinstance(item, str))
        level = [item for outer in level for item in _inside(outer)]
    if length > MAX_CHARACTERS:
        raise GrammarError(f"its texts have {length} characters; at most {MAX_CHARACTERS} can be served")


def check_json_depth(value: object, name: str) -> None:
    """Raises GrammarError if arrays and objects of `value` nest too deeply to be walked."""
    depth, level = 0, [value]
    while level:
        inside = [item for outer in level for item in _inside(outer)]
        depth, level = depth + 1, inside
        if depth > MAX_JSON_DEPTH:
            raise GrammarError(f"the {name} nests deeper than {MAX_JSON_DEPTH} levels: flatten it, or use $ref")


def check_literals(texts: Iterable[str], name: str) -> None:
    """Raises GrammarError if one of the constants is too long, or many of them are long."""
    long = 0
    for text in texts:
        check_literal(text, name)
        long += len(text) if len(text) > _LONG_CHARACTERS else 0
    if long > MAX_LONG_CHARACTERS:
        raise GrammarError(
            f"those of {name} that are longer than {_LONG_CHARACTERS} characters have {long} together; at most "
            f"{MAX_LONG_CHARACTERS} can be enforced"
        )


def check_literal(text: str, name: str) -> None:
    """Raises GrammarError if a constant or a pattern is too long for masks to be computed in time."""
    if len(text) > MAX_LITERAL_CHARACTERS:
        raise GrammarError(f"{name} has {len(text)} characters; at most {MAX_LITERAL_CHARACTERS} can be enforced")


_REGEX_TOKEN = re.compile(
    r"\\[pPxuU]\{[^}]*\}|\\.|\[(?:\^?\](?=[^\]]*\]))?(?:[^\]\\]|\\.)*\]|\{(\d+)(?:,\d*)?\}|.", re.DOTALL
)


def check_regex(pattern: str, name: str) -> None:
    """Raises GrammarError if a regex is too long a constant with its counted repetitions expanded."""
    check_literal(pattern, name)
    if (length := regex_length(pattern)) > MAX_LITERAL_CHARACTERS:
        raise GrammarError(
            f"{name} repeats so that it matches no less than about {length} characters; at most "
            f"{MAX_LITERAL_CHARACTERS} can be enforced"
        )


def regex_length(pattern: str) -> int:
    """Returns about how many characters a regex has with repetitions expanded as often as they must occur.

    The library expands repetitions, and does so at once when an output comes to them. Alternatives count together.
    """
    groups, last = [0], 0
    for token in _REGEX_TOKEN.finditer(pattern):
        text = token[0]
        if token[1]:
            count = max(1, int(token[1][:12]))
            groups[-1] += last * (count - 1)
            last *= count
        elif text == "(":
            groups.append(0)
            last = 0
        elif text == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        elif text not in ("|", "?", "*", "+"):
            last = 1
            groups[-1] += 1
    return sum(groups)


def _inside(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else []


_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "contains")
_SINGLES = (*_SINGLE, "not", "if", "then", "else", "propertyNames", "contentSchema")


def check_schema(schema: Any) -> None:
    """Raises GrammarError if the schema exceeds one of this module's limits, and says which."""
    counts = {"properties": 0, "definitions": 0, "enum": 0}
    most = {"properties": MAX_PROPERTIES, "definitions": MAX_DEFINITIONS, "enum": MAX_ENUM_VALUES}
    pending, edges, texts = [schema], dict[int, list[Any]](), list[str]()
    while pending:
        node = pending.pop()
        if id(node) in edges or not isinstance(node, Mapping):
            continue
        _check_keywords(node)
        counts["properties"] += len(_mapping(node, "properties")) + len(_mapping(node, "patternProperties"))
        counts["definitions"] += len(_mapping(node, "$defs")) + len(_mapping(node, "definitions"))
        counts["enum"] += len(_values(node))
        texts += [value for value in (*_values(node), node.get("const")) if isinstance(value, str)]
        for name, count in counts.items():
            if count > most[name]:
                raise GrammarError(f"the schema has more than {most[name]} {name}: split or shorten it")
        edges[id(node)] = [inner for inner in _schemas_in(node) if isinstance(inner, Mapping)]
        if (target := _resolved(schema, node.get("$ref"))) is not None:
            edges[id(node)].append(target)
        pending += edges[id(node)]
        pending += _mapping(node, "$defs").values()
        pending += _mapping(node, "definitions").values()
    check_literals(texts, "a string in enum or const")
    if _longest_chain(edges) > MAX_SCHEMA_DEPTH:
        raise GrammarError(
            f"the schema nests deeper than {MAX_SCHEMA_DEPTH} schemas, followed through $ref: shorten the chain of "
            "definitions"
        )


def _values(node: Mapping[str, Any]) -> list[Any]:
    values = node.get("enum")
    return values if isinstance(values, list) else []


def _mapping(node: Mapping[str, Any], keyword: str) -> Mapping[str, Any]:
    value = node.get(keyword)
    return value if isinstance(value, Mapping) else {}


def _schemas_in(node: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the schemas of this one's values and of their parts; definitions are excluded."""
    for keyword in _MAPS:
        if keyword not in ("$defs", "definitions"):
            yield from _mapping(node, keyword).values()
    for keyword in _LISTS:
        if isinstance(value := node.get(keyword), list):
            yield from value
    for keyword in _SINGLES:
        if keyword in node:
            yield node[keyword]


def _check_keywords(node: Mapping[str, Any]) -> None:
    required = node.get("required")
    names = set(filter(_is_text, required)) if isinstance(required, list) else set()
    optional = sum(name not in names for name in _mapping(node, "properties"))
    if optional > MAX_OPTIONAL_PROPERTIES:
        raise GrammarError(
            f"an object has {optional} optional properties; at most {MAX_OPTIONAL_PROPERTIES} can be enforced: list "
            "others in required"
        )
    if _states_of(node.get("multipleOf")) > MAX_MULTIPLE_OF:
        raise GrammarError(
            f"the digits of a multipleOf, without the point and trailing zeros, are more than {MAX_MULTIPLE_OF} as a "
            "number: round it"
        )
    if isinstance(pattern := node.get("pattern"), str):
        check_regex(pattern, "a pattern")
    for keyword in ("properties", "patternProperties"):
        for name in _mapping(node, keyword):
            (check_regex if keyword == "patternProperties" else check_literal)(name, f"a name in {keyword}")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _states_of(multiple_of: object) -> int:
    """Returns the number that the digits form, without the point and trailing zeros."""
    if isinstance(multiple_of, bool) or not isinstance(multiple_of, int | float):
        return 0
    number = Decimal(multiple_of if isinstance(multiple_of, int) else repr(multiple_of))
    if not number.is_finite():
        return 0
    digits = "".join(map(str, number.as_tuple().digits)).strip("0")
    return int(digits[:_MOST_DIGITS] or 0)


def _resolved(root: Any, reference: object) -> Any:
    """Returns the schema that a `$ref` within the document names, or None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isascii() and name.isdigit() and int(name[:9]) < len(found):
            found = found[int(name[:9])]
        else:
            return None
    return found if isinstance(found, Mapping) else None


def _longest_chain(edges: Mapping[int, list[Any]]) -> int:
    """Returns the length of the longest path along the edges. An edge back to a node of the path is ignored."""
    lengths: dict[int, int] = {}
    for start in edges:
        if start in lengths:
            continue
        path = [(start, iter(edges[start]))]
        lengths[start] = 1
        on_path = {start}
        while path:
            node, following = path[-1]
            inner = next(following, None)
            if inner is None:
                path.pop()
                on_path.discard(node)
                if path:
                    lengths[path[-1][0]] = max(lengths[path[-1][0]], 1 + lengths[node])
            elif id(inner) in on_path:
                continue
            elif id(inner) in lengths:
                lengths[node] = max(lengths[node], 1 + lengths[id(inner)])
            elif id(inner) in edges:
                path.append((id(inner), iter(edges[id(inner)])))
                lengths[id(inner)] = 1
                on_path.add(id(inner))
    return max(lengths.values(), default=0)


_LARK_TEXT = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//[^\n]*|#[^\n]*')
_LARK_RULE = re.compile(r"^[ \t]*[?!]?([A-Za-z_][A-Za-z0-9_-]*)[^:\n|]*:", re.MULTILINE)
_LARK_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


def check_lark(lark: str) -> None:
    """Raises GrammarError if the rules of a client's Lark grammar are too many, too long or refer too deeply."""
    texts = [text[0] for text in _LARK_TEXT.finditer(lark) if text[0][0] in '"/' and not text[0].startswith("//")]
    for text in texts:
        (check_literal if text[0] == '"' else check_regex)(text, "a string or regex of the grammar")
    if (total := sum(map(len, texts))) > MAX_RULES_CHARACTERS:
        raise GrammarError(
            f"the grammar's texts have {total} characters; at most {MAX_RULES_CHARACTERS} can be enforced"
        )
    bare = _LARK_TEXT.sub(" ", lark)
    rules = list(_LARK_RULE.finditer(bare))
    if len(rules) > MAX_RULES:
        raise GrammarError(f"the grammar has {len(rules)} rules; at most {MAX_RULES} can be enforced")
    names = {rule[1]: rule[1] for rule in rules}  # equal names are one object, whose id stands for the rule
    ends = [*(rule.start() for rule in rules[1:]), len(bare)]
    edges: dict[int, list[Any]] = {}
    for rule, end in zip(rules, ends, strict=True):
        found = dict.fromkeys(_LARK_NAME.findall(bare, rule.end(), end))
        edges.setdefault(id(names[rule[1]]), []).extend(names[name] for name in found if name in names)
    if _longest_chain(edges) > MAX_RULE_DEPTH:
        raise GrammarError(f"more than {MAX_RULE_DEPTH} rules of the grammar refer to each other in a row")
    _check_terminals(lark)


_LARK_COUNT = re.compile(r"(?:~\s*|\{)(\d+)")


def _check_terminals(lark: str) -> None:
    """Raises GrammarError if a terminal or rule is too long a constant, with the terminals that it refers to.

    Counts that repeat a part are taken for counts of the whole: no real grammar comes near the limit.
    """
    bodies = _bodies(lark)
    lengths: dict[str, int] = {}

    def length(name: str, depth: int) -> int:
        if name not in lengths:
            lengths[name] = 0  # of one that refers to itself, which the library refuses
            lengths[name] = _length(bodies[name], depth)
        return lengths[name]

    def _length(body: str, depth: int) -> int:
        texts = _LARK_TEXT.findall(body)
        total = sum(regex_length(text) if text[0] == "/" else len(text) for text in texts)
        bare = _LARK_TEXT.sub(" ", body)
        if depth < MAX_RULE_DEPTH:
            total += sum(
                length(name, depth + 1) for name in _LARK_NAME.findall(bare) if name in bodies and name.isupper()
            )
        for count in _LARK_COUNT.findall(bare):
            total *= max(1, int(count[:6]))
        return min(total, 1 << 60)

    for name in bodies:
        if length(name, 0) > MAX_RULES_CHARACTERS:
            raise GrammarError(
                f"{name[:40]} of the grammar is, written out, longer than {MAX_RULES_CHARACTERS} characters: shorten it"
            )


def _bodies(lark: str) -> dict[str, str]:
    """Returns what follows the colon of each rule and terminal, texts included."""
    masked = _LARK_TEXT.sub(lambda text: "\x00" * len(text[0]), lark)
    rules = list(_LARK_RULE.finditer(masked))
    ends = [*(rule.start() for rule in rules[1:]), len(lark)]
    bodies: dict[str, str] = {}
    for rule, end in zip(rules, ends, strict=True):
        bodies[rule[1]] = bodies.get(rule[1], "") + lark[rule.end() : end]
    return bodies
