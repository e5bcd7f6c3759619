"""`match=` of pytest.raises names a code, a parameter or a value; a sentence would hinder those who improve it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
MOST_WORDS = 4
Function = ast.FunctionDef | ast.AsyncFunctionDef


def words_of(pattern: ast.expr) -> int:
    """Returns the number of words of a literal; each value in an f-string is part of a word. 0 if it is no literal."""
    if isinstance(pattern, ast.Constant):
        return len(str(pattern.value).split())
    if isinstance(pattern, ast.JoinedStr):
        return len("".join(str(one.value) if isinstance(one, ast.Constant) else "x" for one in pattern.values).split())
    return 0


def patterns(tree: ast.Module) -> Iterator[ast.expr]:
    """Yields each argument `match`, and in its place a parameter's values if it is one of the test's parameters."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for function in (node for node in ast.walk(tree) if isinstance(node, Function)):
        columns = dict(_columns(function, constants))
        for node in ast.walk(function):
            if isinstance(node, ast.keyword) and node.arg == "match":
                name = node.value.id if isinstance(node.value, ast.Name) else ""
                yield from columns.get(name, [node.value])


def _columns(function: Function, constants: dict[str, ast.expr]) -> Iterator[tuple[str, list[ast.expr]]]:
    """Yields each name that `parametrize` fills, with its values."""
    for decorator in function.decorator_list:
        if not isinstance(decorator, ast.Call) or not ast.unparse(decorator.func).endswith("parametrize"):
            continue
        names_of, table = decorator.args[:2]
        if isinstance(table, ast.Name):
            table = constants.get(table.id, table)
        rows = table.elts if isinstance(table, ast.List | ast.Tuple) else []
        if isinstance(names_of, ast.Constant):
            names = [name.strip() for name in str(names_of.value).split(",")]
        else:
            names = [str(one.value) for one in getattr(names_of, "elts", []) if isinstance(one, ast.Constant)]
        cells = [_cells(row) for row in rows]
        for column, name in enumerate(names):
            yield name, [row[column] for row in cells if column < len(row)]


def _cells(row: ast.expr) -> list[ast.expr]:
    if isinstance(row, ast.Call) and ast.unparse(row.func).endswith("param"):
        return row.args
    return row.elts if isinstance(row, ast.Tuple | ast.List) else [row]


def too_long(text: str) -> list[str]:
    found = [pattern for pattern in patterns(ast.parse(text)) if words_of(pattern) > MOST_WORDS]
    return [f"line {pattern.lineno}: {ast.unparse(pattern)}" for pattern in found]


def test_match_names_a_code_or_a_parameter_in_all_tests() -> None:
    found = {str(path.relative_to(TESTS)): too_long(path.read_text()) for path in sorted(TESTS.rglob("*.py"))}
    assert {path: lines for path, lines in found.items() if lines} == {}


RAISES = """
@pytest.mark.parametrize(("value", "message"), [(1, "page_size"), pytest.param(2, {message_part!r}, id="two")])
def test(value, message):
    with pytest.raises(ValueError, match={argument}):
        pass
"""


@pytest.mark.parametrize(
    ("argument", "message_part", "is_long"),
    [
        ("'page_size'", "x", False),
        ("'page_size is 24 tokens'", "x", False),
        ("'page_size is 24 tokens: choose 16'", "x", True),
        ("f'page {value} is not there'", "x", True),
        ("message", "x", False),
        ("message", "choose a multiple of 16", True),
        ("other", "choose a multiple of 16", False),
    ],
)
def test_a_sentence_is_found_when_it_is_a_literal_or_a_parameter(
    argument: str, message_part: str, is_long: bool
) -> None:
    assert bool(too_long(RAISES.format(argument=argument, message_part=message_part))) is is_long
