"""Limits the work that one rendering of a chat template may do: every operation is charged before it is done.

A template comes from whoever made the model, and what it reads from clients; neither may block a process or fill its
memory. A unit is about a nanosecond: a character that is made or looked through costs one, an operation OPERATION.
Knows no Jinja.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import GeneratorType
from typing import Any

OPERATION = 64
"""Least units that the evaluation of one node of a template costs."""
DEFAULT_UNITS = 1 << 29
"""Units of one rendering, about a second: a conversation of 16 MiB takes less than half of it."""
PROBE_UNITS = 1 << 26
"""Units of a rendering of a few words, which finds out what a template makes of messages when it is loaded."""
MAX_INTEGER_BITS = 256
"""Most bits of the result of a template's arithmetic; templates count messages."""


class TemplateBudgetError(Exception):
    """A template did more work than one rendering may."""


class UnboundedOperationError(Exception):
    """A template does something whose work cannot be known beforehand."""


class _Budget(threading.local):
    """The budget of the rendering that runs on this thread."""

    units = DEFAULT_UNITS
    limit = DEFAULT_UNITS


_budget = _Budget()


@contextmanager
def rendering_units(units: int) -> Iterator[None]:
    """Limits each rendering on this thread within the block, to no more than a block around it does."""
    before, _budget.limit = _budget.limit, min(_budget.limit, units)
    try:
        yield
    finally:
        _budget.limit = before


@contextmanager
def one_rendering() -> Iterator[None]:
    """Gives the rendering within the block a budget of its own."""
    before, _budget.units = _budget.units, _budget.limit
    try:
        yield
    finally:
        _budget.units = before


def charge(units: int) -> None:
    """Raises TemplateBudgetError if the rendering has less than `units` left."""
    _budget.units -= units
    if _budget.units < 0:
        _budget.units = 0
        raise TemplateBudgetError("the chat template does more work than a rendering may")


def charge_value(value: Any) -> None:
    """Charges for looking through a whole value once. Values that share parts cost as often as these are seen."""
    if type(value) is str:
        charge(len(value))
        return
    rest = [value]
    while rest:
        value = rest.pop()
        if isinstance(value, str | bytes):
            charge(OPERATION + len(value))
        elif isinstance(value, range):
            charge(OPERATION * (1 + len(value)))
        elif isinstance(value, list | tuple | set | frozenset):
            charge(OPERATION * (1 + len(value)))
            rest += value
        elif isinstance(value, Mapping):
            charge(OPERATION * (1 + 2 * len(value)))
            rest += value
            rest += value.values()
        else:
            charge(OPERATION)


def charged_iteration(iterable: Any, units: int) -> Any:
    """Returns the iterable and charges for it: at once if its length is known, and by the item if it is not."""
    if isinstance(iterable, list | tuple | str | Mapping | range):
        charge(units * (1 + len(iterable)))
        return iterable
    if isinstance(iterable, GeneratorType):
        return _paid_items(iterable, units)
    return iterable if not hasattr(type(iterable), "__iter__") else _paid_items(iterable, units)


def _paid_items(items: Any, units: int) -> Iterator[Any]:
    for item in items:
        charge(units)
        yield item


def charge_operator(operator: str, left: Any, right: Any) -> None:
    """Charges for `left operator right`. Raises UnboundedOperationError if its size cannot be known."""
    if isinstance(left, int) and isinstance(right, int):
        _charge_integers(operator, int(left), int(right))
    elif isinstance(left, float | int) and isinstance(right, float | int):
        charge(OPERATION)
    elif operator == "+":
        charge(OPERATION + _length(left) + _length(right))
    elif operator == "*":
        times, value = (left, right) if isinstance(left, int) else (right, left)
        charge(OPERATION + max(0, times if isinstance(times, int) else 0) * (1 + _length(value)))
    elif operator == "%":
        raise UnboundedOperationError("% of text")
    else:
        charge(OPERATION)


def _charge_integers(operator: str, left: int, right: int) -> None:
    charge(OPERATION)
    bits = left.bit_length()
    if operator == "**":
        bits *= max(1, right)
    elif operator == "*":
        bits += right.bit_length()
    if bits > MAX_INTEGER_BITS:
        raise TemplateBudgetError(f"the chat template counts beyond {MAX_INTEGER_BITS} bits")


def _length(value: Any) -> int:
    return len(value) * (1 if isinstance(value, str | bytes) else OPERATION) if hasattr(value, "__len__") else 0
