"""Values that skills are about (places, people, numbers): drawn at random, never asked whether they are true."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

Value = str | int | float | bool | list[str]
Draw = Callable[[random.Random], Value]

SKILLS: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "data" / "skills.yaml").read_text(encoding="utf-8"))
"""The whole file."""
POOLS: dict[str, list[str]] = SKILLS["values"]
_SYLLABLES: list[str] = SKILLS["syllables"]


def word(rng: random.Random) -> str:
    """A word that means nothing, so that it can only be copied."""
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 4)))


def _number(rng: random.Random) -> int:
    return rng.randint(0, rng.choice((12, 100, 999, 9999)))  # small more often than large


def _full_name(rng: random.Random) -> str:
    return f"{rng.choice(POOLS['person'])} {rng.choice(POOLS['surname'])}"


def _date(rng: random.Random) -> str:
    return f"{rng.randint(2020, 2030)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def _time(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02}:{rng.choice((0, 15, 30, 45)):02}"


def _sum(rng: random.Random) -> str:
    return f"{_number(rng)} {rng.choice('+-*/')} {_number(rng)}"


def _email(rng: random.Random) -> str:
    host = rng.choice(("example", "mail", word(rng)))
    return f"{rng.choice(POOLS['person']).lower()}@{host}.{rng.choice(('com', 'org'))}"


def _from(pool: list[str]) -> Draw:
    return lambda rng: rng.choice(pool)


def _some(pool: list[str]) -> Draw:
    return lambda rng: rng.sample(pool, rng.randint(2, 3))


DRAWS: dict[str, Draw] = {name: _from(pool) for name, pool in POOLS.items()} | {
    "full_name": _full_name,
    "date": _date,
    "time": _time,
    "word": word,
    "sum": _sum,
    "email": _email,
    "number": _number,
    "count": lambda rng: rng.randint(1, 10),
    "age": lambda rng: rng.randint(5, 90),
    "percent": lambda rng: rng.randint(0, 100),
    "price": lambda rng: round(rng.uniform(1, 500), 2),
    "flag": lambda rng: rng.random() < 0.5,
    "people": _some(POOLS["person"]),
    "skills": _some(POOLS["skill"]),
    "colours": _some(POOLS["colour"]),
}
"""By kind."""


def json_type(value: Value) -> str:
    """What JSON Schema calls the type of this value."""
    if isinstance(value, bool):
        return "boolean"
    return {str: "string", int: "integer", float: "number", list: "array"}[type(value)]


def spoken(value: Value) -> str:
    """As people write it in a sentence."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return f"{', '.join(value[:-1])} and {value[-1]}"
    return str(value)
