"""Parses Kubernetes' quantities, and types texts with a fixed form.

https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
"""

import re
from functools import lru_cache
from typing import Annotated

from pydantic import AfterValidator, Field, WithJsonSchema

QUANTITY_PATTERN = r"^(\+|-)?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"
_QUANTITY = re.compile(r"^[+-]?[0-9.]+(?P<suffix>[a-zA-Z].*)?$")
_SUFFIXES = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3}
_SUFFIXES |= {letter: 1000.0**power for power, letter in enumerate("MGTPE", start=2)}
_SUFFIXES |= {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", start=1)}
LARGEST = float(2**63 - 1)
"""The most that Kubernetes counts, in magnitude."""


@lru_cache(maxsize=1024)
def parse_quantity(value: int | str) -> float:
    """Returns the number that a quantity such as `250m`, `1Gi` or 3 stands for; beyond LARGEST that, as Kubernetes
    does. Raises ValueError for anything else.
    """
    return max(-LARGEST, min(LARGEST, _number(value)))


def _number(value: int | str) -> float:
    if isinstance(value, int):
        return float(max(-(2**63), min(2**63, value)))
    match = _QUANTITY.match(value)
    if match is None or not re.match(QUANTITY_PATTERN, value):
        raise ValueError(f"{value!r} is not a Kubernetes quantity: write a number such as 2, 250m, 256Mi or 1Gi")
    suffix = match.group("suffix") or ""
    if suffix in _SUFFIXES:
        return float(value.removesuffix(suffix)) * _SUFFIXES[suffix]
    return float(value)  # with an exponent, such as 1e3


def _checked_quantity(value: int | str) -> int | str:
    parse_quantity(value)
    return value


Quantity = Annotated[
    int | str,
    AfterValidator(_checked_quantity),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "pattern": QUANTITY_PATTERN,
            "maxLength": 32,
        }
    ),
]
ShortText = Annotated[str, Field(max_length=1024)]
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
"""The metadata.name of another object: a DNS subdomain."""
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")]
LABEL_KEY_PATTERN = (
    r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"  # prefix/name
)
