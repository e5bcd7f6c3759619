"""Which metrics and labels a PromQL expression reads. Scans the expressions of this repository; it is no parser."""

import re
from dataclasses import dataclass

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?\{([^}]*)\}")
_RANGE = re.compile(r"\[[^\]]*\]")
_NAME = re.compile(r"(?<![\w:.])[a-zA-Z_:][a-zA-Z0-9_:]*(?!\s*\(|[a-zA-Z0-9_:(])")
_KEYWORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan", "by", "without", "on", "ignoring"}


@dataclass(frozen=True, slots=True)
class Reads:
    """What an expression needs to be there."""

    metrics: frozenset[str]
    labels: frozenset[str]
    """In matchers and groupings; of which metric is not told apart."""


def reads(expression: str) -> Reads:
    """Take an expression apart; Grafana's variables may stand in it."""
    text = _STRING.sub('""', expression.replace("$__rate_interval", "5m"))
    labels: set[str] = set()
    for grouped in _GROUPING.findall(text):
        labels |= {name.strip() for name in grouped.split(",") if name.strip()}
    text = _GROUPING.sub(" ", text)
    metrics = {name for name, _ in _SELECTOR.findall(text) if name}
    for _, matchers in _SELECTOR.findall(text):
        labels |= set(re.findall(r"([a-zA-Z_][a-zA-Z0-9_]*)\s*[=!]", matchers))
    bare = _RANGE.sub(" ", _SELECTOR.sub(" ", text))
    metrics |= {name for name in _NAME.findall(bare) if name not in _KEYWORDS}
    return Reads(frozenset(metrics), frozenset(labels))
