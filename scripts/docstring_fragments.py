"""Counts docstrings that are fragments: `python scripts/docstring_fragments.py [--list] [PATHS]`.

A docstring's first clause has a subject and a verb, or begins with a verb, and can be read without the code above it.
What begins with a relative word or a preposition, and has no main clause, is a fragment. So is a mere reference.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("contract", "process", "web", "prompts", "apis", "engine", "gateway", "operator")
LIMIT = 0.03
"""The largest share of fragments that passes."""
_REFERENCE = re.compile(
    r"(See|As|Like|The same|The other|The others|Those|These|That|Its|Also|Same)\b(?! (is|are|was)\b)"
)
_RELATIVE = re.compile(r"(Of|What|Whatever|Which|Who|Whoever|Whose|Whom|Whether|Where|Why|How|Than)\b")
_ADVERBIAL = re.compile(
    r"(After|Among|At|Because|Before|Behind|Below|Beside|Between|By|During|For|From|If|In|Into|On|Once|Only|Over|Since|"
    r"So|Through|To|Under|Until|When|While|With|Within|Without)\b"
)


@dataclass(frozen=True, slots=True)
class Docstring:
    """A docstring with its place."""

    path: Path
    line: int
    text: str


def is_fragment(text: str) -> bool:
    """Returns True if the docstring's first clause cannot be read alone."""
    sentence = re.split(r"(?<=[^.A-Z])[.!?](?:\s|$)|\n\n", text.strip(), maxsplit=1)[0]
    if _RELATIVE.match(sentence) or _REFERENCE.match(sentence):
        return True
    return bool(_ADVERBIAL.match(sentence)) and "," not in sentence


def docstrings(path: Path) -> Iterator[Docstring]:
    """Yields the docstrings of a file: of modules, classes and functions, and those below an assignment."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for earlier, statement in zip([None, *body], body, strict=False):
            documents = earlier is None or isinstance(earlier, ast.Assign | ast.AnnAssign)
            if documents and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str):
                    yield Docstring(path, statement.lineno, text)


def main() -> int:
    """Prints the share of fragments of each package. Returns 1 if one of all docstrings is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, default=[Path(name) for name in PACKAGES])
    parser.add_argument("--list", action="store_true", help="print each fragment with its place")
    options = parser.parse_args()
    total = wrong = 0
    for root in options.paths:
        files = sorted(root.rglob("*.py")) if root.is_dir() else [root]
        found = [one for path in files for one in docstrings(path)]
        fragments = [one for one in found if is_fragment(one.text)]
        if options.list:
            for one in fragments:
                print(f"{one.path}:{one.line}: {one.text.strip().splitlines()[0][:100]}")
        print(f"{root}: {len(fragments)} of {len(found)} docstrings are fragments")
        total, wrong = total + len(found), wrong + len(fragments)
    if wrong > LIMIT * total:
        print(f"{wrong} of {total} docstrings are fragments ({wrong / total:.1%}); at most {LIMIT:.0%} may be")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
