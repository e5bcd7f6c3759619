"""Makes questions that the model must decline: other libraries' names, names that do not exist, and everything else.

Half of their parts are held out, so that an evaluation measures whether declining generalises. Knows no answers.
"""

import random
from typing import Any

import yaml

from demo.entries import DATA, Entry
from demo.skill_values import POOLS, word

_PARTS: dict[str, Any] = yaml.safe_load((DATA / "out_of_scope.yaml").read_text(encoding="utf-8"))
_PLACES = ("city", "country", "person", "product", "food", "topic", "job", "room")
"""Pools of skill values that serve as further subjects."""


class OutOfScope:
    """Draws questions that no entry answers; the same random source draws the same questions."""

    def __init__(self, entries: list[Entry], rng: random.Random, held_out: bool = False) -> None:
        """`held_out=True` draws templates, subjects and packages that training never sees."""
        self._rng, self._held_out = rng, held_out
        self._names = {entry.name for entry in entries}
        self._suffixes = {suffix for name in self._names for suffix in suffixes(name)}
        self._modules = sorted({name.rpartition(".")[0] for name in self._names if "." in name})
        self._lasts = sorted({name.rpartition(".")[2] for name in self._names})

    def question(self) -> str:
        """Returns one question about a random thing that the library does not document."""
        draw = self._rng.random()
        if draw < 0.45:
            text = self._rng.choice(_PARTS["name_questions"]).format(self.name())
        elif draw < 0.85:
            template = self._rng.choice(self._of("open_questions"))
            text = template.format(*(self._subject() for _ in range(template.count("{}"))))
        else:
            text = self._rng.choice(self._of("fixed"))
        return self._careless(text)

    def name(self) -> str:
        """Returns a name that looks like a documented one and is none."""
        while True:
            name = self._made_up_name()
            if name not in self._names and name not in self._suffixes:
                return name

    def _made_up_name(self) -> str:
        draw = self._rng.random()
        if draw < 0.5:
            package, attribute = self._rng.choice(self._of("packages")), self._rng.choice(self._of("attributes"))
            return package if self._rng.random() < 0.15 else f"{package}.{attribute}"
        if draw < 0.7:
            return f"{self._rng.choice(self._modules)}.{word(self._rng)}"
        if draw < 0.85:
            return word(self._rng) if self._rng.random() < 0.5 else f"{word(self._rng)}.{word(self._rng)}"
        return f"{self._rng.choice(self._of('packages'))}.{self._rng.choice(self._lasts)}"

    def _subject(self) -> str:
        if self._held_out or self._rng.random() < 0.7:
            return str(self._rng.choice(self._of("subjects")))
        return self._rng.choice(POOLS[self._rng.choice(_PLACES)])

    def _of(self, part: str) -> list[str]:
        listed: list[str] = _PARTS[f"held_out_{part}" if self._held_out else part]
        return listed

    def _careless(self, text: str) -> str:
        """Returns the text as people type it: sometimes in lower case, or without its last mark."""
        if self._rng.random() < 0.15:
            text = text[0].lower() + text[1:]
        if self._rng.random() < 0.15 and text[-1] in "?.":
            text = text[:-1]
        return text


def suffixes(name: str) -> list[str]:
    """Returns the shorter ways to write a dotted name: `dedent` for `textwrap.dedent`."""
    parts = name.split(".")
    return [".".join(parts[count:]) for count in range(1, len(parts))]
