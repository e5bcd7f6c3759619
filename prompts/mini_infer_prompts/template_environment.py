"""The Jinja environment of chat templates: sandboxed, without constant folding, and each operation charged.

Loops, concatenated text, calls, filters, comparisons and arithmetic are charged before they are done (template_budget).
A few operations have a size that cannot be known beforehand: `is_bounded` says whether a template has any, and a strict
environment refuses them as they come. What a template may do and what it sees is otherwise that of transformers.
"""

import datetime
import json
from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from types import BuiltinMethodType
from typing import Any, NoReturn, cast

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from mini_infer_prompts.template_budget import (
    OPERATION,
    UnboundedOperationError,
    charge,
    charge_operator,
    charge_value,
    charged_iteration,
)

MAX_SOURCE_CHARACTERS = 64 << 10
"""Most characters of a template that is compiled beside others' requests; those of public models have up to 25,000."""
MAX_DEPTH = 100
"""Most levels of a template's nodes within each other."""

_FILTERS = frozenset(
    (
        *("abs", "capitalize", "count", "d", "default", "e", "escape", "first", "float", "int", "items"),
        *("join", "last", "length", "list", "lower", "map", "reject", "rejectattr", "replace", "reverse", "round"),
        *("safe", "select", "selectattr", "string", "title", "tojson", "trim", "upper"),
    )
)
_LAZY = frozenset(("map", "reject", "rejectattr", "select", "selectattr"))
"""Filters that run others: each item is charged as it comes."""
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        (
            *("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdecimal"),
            *("isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip"),
            *("partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit"),
            *("rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper"),
        )
    ),
    dict: frozenset(("get", "items", "keys", "values")),
    list: frozenset(("count", "index")),
}
_GLOBALS = frozenset(("dict", "namespace", "raise_exception", "range", "strftime_now"))
_COMPARED = frozenset(
    ("==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "<=", "le", "lessthan", "in")
)
_CALL_UNITS = 64 * OPERATION
"""Units of a call of a macro, and of a call that goes through Jinja's sandbox."""
_CALL_VARIABLES = ("_loop_vars", "_block_vars")
_UNBOUNDED_NODES = (
    *(nodes.Import, nodes.FromImport, nodes.Include, nodes.Extends, nodes.Block, nodes.With),
    *(nodes.ScopedEvalContextModifier, nodes.EvalContextModifier, nodes.FilterBlock),
)
_DICT_ATTRIBUTES = frozenset(dir(dict))


@lru_cache(maxsize=2)
def template_environment(strict: bool) -> "TemplateEnvironment":
    """Returns the environment that templates of models share. `strict` refuses the operations that `is_bounded` looks
    for.
    """
    environment = TemplateEnvironment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.is_strict = strict
    environment.filters["tojson"] = _to_json  # Jinja's own escapes HTML
    environment.filters = {
        name: _refused(name, function) if strict and name not in _FILTERS else _charged(name, function)
        for name, function in environment.filters.items()
    }
    environment.filters |= {"_add": _add, "_compare": _compare, "_loop": charged_iteration, "_slice": _slice}
    environment.filters |= {"_concat": _concat, "_spend": _spend}
    for name in _COMPARED:
        environment.tests[name] = _charged_test(environment.tests[name])  # type: ignore[arg-type]  # jinja's is too wide
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def is_bounded(source: str) -> bool:
    """True if all that the template does is charged, as far as its text shows. Raises TemplateSyntaxError if it is no
    template.
    """
    if len(source) > MAX_SOURCE_CHARACTERS:
        return False
    try:
        return _is_bounded(template_environment(strict=True).parse(source), 0)
    except RecursionError:
        return False


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with each operation charged."""

    intercepted_binops = frozenset(("-", "*", "/", "//", "%", "**"))
    is_strict = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, finalize=self._finalized)
        self.code_generator_class = _CodeGenerator
        self.concat = _joined  # type: ignore[method-assign]  # as Jinja's native environment does

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Returns what Jinja's own method returns, in a quarter of the time for the fields of messages."""
        if type(obj) is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Charges for the operation before Jinja does it."""
        try:
            charge_operator(operator, left, right)
        except UnboundedOperationError:
            if self.is_strict:
                raise
            charge_value(left)
            charge_value(right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as jinja2 has it
        """Charges for the call before it is made; known methods of built-in types are called directly."""
        charge(4 * OPERATION)
        if isinstance(__obj, BuiltinMethodType):
            owner: Any = __obj.__self__
            if __obj.__name__ in _METHODS.get(type(owner), ()):
                _charge_method(owner, __obj.__name__, args)
                if kwargs:  # Jinja's own words to macros, which its context takes out otherwise.
                    kwargs = {name: value for name, value in kwargs.items() if name not in _CALL_VARIABLES}
                return __obj(*args, **kwargs)
        elif not __self._is_allowed(__obj) and __self.is_strict:
            raise UnboundedOperationError(f"a call of {__obj!r:.80}")
        if isinstance(__obj, BuiltinMethodType):
            if __self.is_strict:
                raise UnboundedOperationError(f"a call of {__obj.__name__}")
            charge_value(__obj.__self__)
        charge(_CALL_UNITS)
        charge_value(args)
        charge_value([value for name, value in kwargs.items() if name not in _CALL_VARIABLES])
        return super().call(__context, __obj, *args, **kwargs)

    def _is_allowed(self, function: Any) -> bool:
        if isinstance(function, jinja2.runtime.Macro | jinja2.Undefined):
            return True
        if isinstance(getattr(function, "__self__", None), jinja2.runtime.LoopContext | _GenerationTag):
            return True
        return any(function is self.globals.get(name) for name in _GLOBALS)

    def _finalized(self, value: Any) -> Any:
        """Returns an output value: text as it is, anything else after it was charged for."""
        if type(value) is not str:
            if isinstance(value, jinja2.utils.Namespace) and self.is_strict:
                raise UnboundedOperationError("a namespace that is shown")
            charge_value(value)
        return value

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _ChargeOperations().visit(super()._parse(source, name, filename))
        template.set_environment(self)
        return template


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Generates code that computes nothing at compile time but what stands in the template as it is."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
        if isinstance(node, nodes.TemplateData):
            return super()._output_child_to_const(node, frame, finalize)
        if isinstance(node, nodes.Const) and isinstance(node.value, str):
            return node.value
        raise nodes.Impossible


class _ChargeOperations(NodeTransformer):
    """Rewrites what Jinja would compile to bare Python into filters that charge."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - as jinja2 names it
        """Charges each pass of a loop for the nodes of its body."""
        units = OPERATION * sum(_weight(child) for child in (*node.body, *([node.test] if node.test else [])))
        self.generic_visit(node)
        node.iter = _filter(cast("nodes.Expr", node.iter), "_loop", nodes.Const(units + OPERATION))
        if node.recursive:
            node.body.insert(0, _spending(units))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802 - as jinja2 names it
        """Charges each call of a macro for the nodes of its body."""
        units = OPERATION * sum(map(_weight, node.body))
        self.generic_visit(node)
        node.body.insert(0, _spending(units))
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802 - as jinja2 names it
        """Charges each use of a call block for the nodes of its body."""
        units = OPERATION * sum(map(_weight, node.body))
        self.generic_visit(node)
        node.body.insert(0, _spending(units))
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:  # noqa: N802 - as jinja2 names it
        """Makes a sum of several terms, such as a + b + c, one operation, whose text is made once."""
        parts: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            parts.append(left.right)
            left = left.left
        visited: list[nodes.Expr] = [self.visit(part) for part in (left, *reversed(parts))]
        return _filter(visited[0], "_add", *visited[1:])

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - as jinja2 names it
        """Makes a concatenation by `~` one operation, whose text is made once."""
        visited: list[nodes.Expr] = [self.visit(part) for part in node.nodes]
        return _filter(visited[0], "_concat", *visited[1:])

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802 - as jinja2 names it
        """Charges a comparison, unless it is a chain or with something short that stands in the template."""
        self.generic_visit(node)
        if len(node.ops) > 1 or _is_short(node.ops[0].expr) or (node.ops[0].op not in _IN and _is_short(node.expr)):
            return node
        return _filter(node.expr, "_compare", nodes.Const(node.ops[0].op), node.ops[0].expr)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802 - as jinja2 names it
        """Charges a slice, which is a copy."""
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        return _filter(node.node, "_slice", *(end or nodes.Const(None) for end in ends))


_IN = ("in", "notin")
_LONGEST_CONSTANT = 4096


def _is_short(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Const):
        return not isinstance(node.value, str) or len(node.value) <= _LONGEST_CONSTANT
    return isinstance(node, nodes.List | nodes.Tuple) and all(map(_is_short, node.items))


def _filter(node: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None)


def _spending(units: int) -> nodes.ExprStmt:
    return nodes.ExprStmt(_filter(nodes.Const(units + OPERATION), "_spend"))


def _weight(node: nodes.Node) -> int:
    """Returns the number of nodes in `node`; what is within a loop or a macro is charged there."""
    if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
        return 2
    return 1 + sum(map(_weight, node.iter_child_nodes()))


def _is_bounded(node: nodes.Node, depth: int) -> bool:
    if depth > MAX_DEPTH or isinstance(node, _UNBOUNDED_NODES):
        return False
    match node:
        case nodes.For(recursive=True):
            return False
        case nodes.Filter(name=name) if not name.startswith("_") and name not in _FILTERS:
            return False
        case nodes.Filter(name=name, args=args) if name in _LAZY and not _runs_allowed(name, args):
            return False
        case nodes.Compare(ops=ops) if len(ops) > 1:
            return False
        case nodes.Dict(items=items) if not all(isinstance(pair.key, nodes.Const) for pair in items):
            return False
    return all(_is_bounded(child, depth + 1) for child in node.iter_child_nodes())


def _runs_allowed(name: str, args: list[nodes.Expr]) -> bool:
    """True if a filter that runs others names them by short constants, and they are known."""
    if not all(map(_is_short, args)):
        return False
    named = args[1:2] if name.endswith("attr") else args[:1]
    return all(isinstance(one, nodes.Const) and (name != "map" or one.value in _FILTERS - _LAZY) for one in named)


def _charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter that pays for its value before it begins."""
    at = 1 if hasattr(function, "jinja_pass_arg") else 0
    parameters, charge_parameters = _PARAMETERS.get(name, ((), None))

    @wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        value = args[at]
        if name in _LAZY:
            return function(*args[:at], charged_iteration(value, 8 * OPERATION), *args[at + 1 :], **kwargs)
        charge(4 * OPERATION)
        if name in ("list", "join") and isinstance(value, Iterator):
            value = list(charged_iteration(value, OPERATION))
            args = (*args[:at], value, *args[at + 1 :])
        if name not in _WITHOUT_COPY:
            charge_value(args[at:])
        if charge_parameters:
            charge_parameters(value, dict(zip(parameters, args[at + 1 :], strict=False)) | kwargs)
        return function(*args, **kwargs)

    return filtered


def _refused(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter that raises UnboundedOperationError: its work cannot be known beforehand."""

    @wraps(function)
    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnboundedOperationError(f"the filter {name}")

    return refused


_WITHOUT_COPY = frozenset(("length", "count", "default", "d", "first", "last", "safe", "items", "tojson"))
_MAX_INDENT = 16
"""Most characters before a line of JSON for each level."""
_MAX_PRECISION = 16


def _charge_join_filter(value: Any, arguments: dict[str, Any]) -> None:
    _charge_join(str(arguments.get("d", "")), value)


def _charge_replace_filter(value: Any, arguments: dict[str, Any]) -> None:
    _charge_replace(str(value), str(arguments.get("old", "")), str(arguments.get("new", "")))


def _charge_json(value: Any, arguments: dict[str, Any]) -> None:
    """Charges for the text that `tojson` makes: each value with its indentation."""
    indent, separators = arguments.get("indent") or 0, arguments.get("separators") or ()
    indent = len(indent) if isinstance(indent, str) else indent
    if not isinstance(indent, int) or indent > _MAX_INDENT or any(len(str(part)) > _MAX_INDENT for part in separators):
        raise UnboundedOperationError("tojson with a long indent or separator")
    rest = [(value, 1)]
    while rest:
        one, depth = rest.pop()
        charge(2 * OPERATION + indent * depth)
        if isinstance(one, str):
            charge(6 * len(one) if arguments.get("ensure_ascii") else 2 * len(one))
        elif isinstance(one, dict):
            rest += [(part, depth + 1) for pair in one.items() for part in pair]
        elif isinstance(one, list | tuple):
            rest += [(part, depth + 1) for part in one]


def _charge_round(value: Any, arguments: dict[str, Any]) -> None:
    precision = arguments.get("precision", 0)
    if not isinstance(precision, int) or abs(precision) > _MAX_PRECISION:
        raise UnboundedOperationError("round with a precision")


def _charge_characters(value: Any, arguments: dict[str, Any]) -> None:
    """Charges an operation for each character of a text."""
    charge(OPERATION * len(value) if isinstance(value, str) else 0)


_PARAMETERS: dict[str, tuple[tuple[str, ...], Callable[[Any, dict[str, Any]], None] | None]] = {
    "join": (("d", "attribute"), _charge_join_filter),
    "replace": (("old", "new", "count"), _charge_replace_filter),
    "round": (("precision", "method"), _charge_round),
    "tojson": (("ensure_ascii", "indent", "separators", "sort_keys"), _charge_json),
    **dict.fromkeys(("title", "list", "escape", "e"), ((), _charge_characters)),
}
"""Names of a filter's parameters behind its value, and the function that charges for them."""


def _charged_test(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def tested(*args: Any) -> Any:
        charge_value(args)
        return function(*args)

    return tested


def _charge_method(owner: Any, name: str, args: tuple[Any, ...]) -> None:
    if type(owner) is not str:
        if name in ("count", "index"):
            charge_value(owner)
    elif name == "join":
        if args and isinstance(args[0], list | tuple):
            _charge_join(owner, args[0])
        elif args:
            raise UnboundedOperationError("join of a generator")
    elif name == "replace" and len(args) >= 2:
        _charge_replace(owner, str(args[0]), str(args[1]))
    elif name in ("split", "rsplit", "splitlines"):
        between = str(args[0]) if name != "splitlines" and args and args[0] else ""
        charge(len(owner) + 2 * OPERATION * owner.count(between) if between else 8 * len(owner))
    elif name not in ("startswith", "endswith", "removeprefix", "removesuffix"):
        charge(len(owner))


def _charge_join(between: str, items: Any) -> None:
    if isinstance(items, list | tuple):
        charge(len(between) * len(items))
        charge_value(items)


def _charge_replace(text: str, old: str, new: str) -> None:
    charge(len(text) + len(old))
    charge((text.count(old) if old else len(text) + 1) * len(new))


def _add(value: Any, *others: Any) -> Any:
    """Adds from left to right."""
    if type(value) is str and all(type(other) is str for other in others):
        charge(OPERATION + len(value) + sum(map(len, others)))
        return "".join((value, *others))
    for other in others:
        charge_operator("+", value, other)
        value = value + other
    return value


def _concat(*values: Any) -> str:
    for value in values:
        charge_value(value)
    return "".join(map(str, values))


def _compare(left: Any, operator: str, right: Any) -> Any:
    if type(left) is not str or type(right) is not str or operator in _IN or len(left) == len(right):
        charge_value(left)
        charge_value(right)
    return _OPERATORS[operator](left, right)


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda left, right: left == right,
    "ne": lambda left, right: left != right,
    "gt": lambda left, right: left > right,
    "gteq": lambda left, right: left >= right,
    "lt": lambda left, right: left < right,
    "lteq": lambda left, right: left <= right,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}


def _slice(value: Any, start: Any, stop: Any, step: Any) -> Any:
    if hasattr(value, "__len__"):
        charge(OPERATION + len(value))
    return value[start:stop:step]


def _spend(units: int) -> None:
    charge(units)


def _joined(pieces: Any) -> str:
    """Returns the text that a template, a macro or a block has put out."""
    made = pieces if type(pieces) is list else list(pieces)
    charge(sum(map(len, made)))
    return "".join(made)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(layout: str) -> str:
    charge(256 * len(layout))
    return datetime.datetime.now().strftime(layout)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: marks an assistant's words for training; here it only shows them."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        """Parses the tag into a call block, so that its body has a scope of its own as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_show"), [], [], body).set_lineno(line)

    def _show(self, caller: Callable[[], str]) -> str:
        return caller()
