"""One mutation of a valid value: what a grammar of valid messages needs to become a fuzzer. Pure."""

from copy import deepcopy
from random import Random
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 2**31, 2**53, 2**63 - 1, -(2**63), 0.5, -0.0, 1e308, float("nan"), float("inf"),
    "", " ", "x", "\u0000", "é😀\u202e", "word " * 500, "../../etc/passwd", "tcp://127.0.0.1:1", "a" * 70_000,
    b"", b"\x00" * 16, b"\xff" * 5000, [], [[]], [None], [1, "a"], [0] * 5000, {}, {"": None}, {"type": "Odd"},
)  # fmt: skip


def mutated(random: Random, value: Any) -> Any:
    """Returns a copy of a tree of dicts and lists in which one place is changed, removed, doubled or added."""
    copy = deepcopy(value)
    places = _places(copy)
    if not places:
        return random.choice(ODD_VALUES)
    inside, key = random.choice(places)
    draw = random.random()
    if draw < 0.12:
        del inside[key]
    elif draw < 0.2 and isinstance(inside, dict):
        inside[f"{key}s"] = random.choice(ODD_VALUES)
    elif draw < 0.28 and isinstance(inside, list):
        inside.insert(key, deepcopy(inside[key]))
    elif draw < 0.4 and isinstance(inside[key], int) and not isinstance(inside[key], bool):
        inside[key] += random.choice((-1, 1, 16, -16, 1000))
    else:
        inside[key] = deepcopy(random.choice(ODD_VALUES))
    return copy


def mutated_bytes(random: Random, wire: bytes) -> bytes:
    """Returns the bytes cut, doubled, with some changed, or others in their place."""
    at = random.randrange(len(wire)) if wire else 0
    return random.choice(
        (
            wire[:at],
            wire[:at] + random.randbytes(random.randint(1, 20)) + wire[at:],
            wire[:at] + bytes([random.randrange(256)]) + wire[at + 1 :],
            wire + wire,
            random.randbytes(random.randint(0, 300)),
            b"\x93" * 2000,
        )
    )


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container below `value` with each of its keys."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        inside = waiting.pop()
        keys = list(inside) if isinstance(inside, dict) else range(len(inside)) if isinstance(inside, list) else ()
        for key in keys:
            found.append((inside, key))
            waiting.append(inside[key])
    return found
