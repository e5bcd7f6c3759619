import json

import pytest

from mini_infer_engine.parsing.python_literals import as_json

CASES = {
    " 5 ": "5",
    "true": "true",
    "True": "true",
    "None": "null",
    "'it\\'s'": '"it\'s"',
    "{'a': (1, 2.5), 'b': [False]}": '{"a": [1, 2.5], "b": [false]}',
    '{"a": [true, null]}': '{"a": [true, null]}',
    "a word": '"a word"',
    "NaN": '"NaN"',
    "1e999": "1e999",
    "-Infinity": '"-Infinity"',
    "open('/etc/passwd')": "\"open('/etc/passwd')\"",
    "{1, 2}": '"{1, 2}"',
    "": '""',
}


@pytest.mark.parametrize(("text", "expected"), CASES.items())
def test_python_literals_are_converted_to_json(text: str, expected: str) -> None:
    assert as_json(text) == expected
    json.loads(expected)


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 100_000, "(" * 5000 + ")" * 5000, "{'a':" * 3000])
def test_deep_and_long_python_literals_are_converted(text: str) -> None:
    assert json.loads(as_json(text)) == text
