"""Maps each linear layer of a checkpoint to its quantisation scheme by its name. Knows neither torch nor any format."""

import re
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property
from typing import Literal

from mini_infer_engine.config.quantization.fp4 import Fp4Scheme
from mini_infer_engine.config.quantization.integer import IntegerScheme

Strategy = Literal["tensor", "channel", "block"]
ALL_LINEAR = "Linear"
"""The target that stands for every linear layer: torch's class, in compressed-tensors' words."""
PATTERN = "re:"
"""Prefix of a target that is a regular expression."""


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """Weights in float8 e4m3fn with scales; activations stay in the model's dtype."""

    strategy: Strategy
    """The part of a weight that shares a scale: the tensor, a row, or a block."""
    block: tuple[int, int]
    """Rows and columns that share a scale, with strategy "block"."""
    scale_name: str
    """Name of the scales beside `weight` in the checkpoint."""

    @property
    def name(self) -> str:
        """The scheme's name in messages."""
        return f"fp8 by {self.strategy}"


Scheme = Fp8Scheme | IntegerScheme | Fp4Scheme


@dataclass(frozen=True, slots=True)
class Rule:
    """The scheme of the layers that a target names."""

    target: str
    """`ALL_LINEAR`, a layer's name in the checkpoint, or "re:" and a regular expression that matches its beginning."""
    scheme: Scheme | None
    """The scheme; None if these layers are not quantised."""

    def is_of(self, layer: str) -> bool:
        """True if the target names the layer of this name."""
        if self.target.startswith(PATTERN):
            return re.match(self.target.removeprefix(PATTERN), layer) is not None
        return self.target in (ALL_LINEAR, layer)


@dataclass(frozen=True)
class Schemes:
    """The schemes of a checkpoint's linear layers; nearly always one for all."""

    rules: tuple[Rule, ...]
    """Rules in order: a layer's is the one whose target is its name, else the first that matches it."""
    ignored: tuple[str, ...] = ()
    """Layers that are not quantised, whatever the rules say: names, beginnings of names, or patterns."""

    @classmethod
    def of_all(cls, scheme: Scheme, ignored: tuple[str, ...]) -> "Schemes":
        """Returns one scheme for all linear layers but those that are ignored."""
        return cls((Rule(ALL_LINEAR, scheme),), ignored)

    @property
    def name(self) -> str:
        """The names of all schemes, for messages."""
        return ", ".join(dict.fromkeys(rule.scheme.name for rule in self.rules if rule.scheme is not None))

    def scheme_of(self, layer: str) -> Scheme | None:
        """Returns the scheme of the layer that has this name in the checkpoint; None if it is not quantised."""
        rule = self._rule_of(layer)
        return None if rule is None else rule.scheme

    def reason_of(self, layer: str) -> str:
        """Says why the layer has its scheme: the target that names it."""
        if self._ignores(layer):
            return "ignored"
        rule = self._rule_of(layer)
        return "no target" if rule is None else f"target {rule.target!r}"

    def _ignores(self, layer: str) -> bool:
        return any(pattern.match(layer) for pattern in self._ignored_patterns)

    def _rule_of(self, layer: str) -> Rule | None:
        if self._ignores(layer):
            return None
        own = self._by_target.get(layer)
        return own or next((rule for rule in self._of_many if rule.is_of(layer)), None)

    # A mixture has tens of thousands of layers, and its config may name each: what follows is made once.

    @cached_property
    def _by_target(self) -> dict[str, Rule]:
        return {rule.target: rule for rule in self.rules}

    @cached_property
    def _of_many(self) -> list[Rule]:
        return [rule for rule in self.rules if rule.target == ALL_LINEAR or rule.target.startswith(PATTERN)]

    @cached_property
    def _ignored_patterns(self) -> list[re.Pattern[str]]:
        """Returns each regular expression, and one for all names, beginnings of names and patterns with wildcards."""
        named = [f"{re.escape(name)}(\\.|$)|{translate(name)}" for name in self.ignored if not name.startswith(PATTERN)]
        expressions = [name.removeprefix(PATTERN) for name in self.ignored if name.startswith(PATTERN)]
        return [re.compile(expression) for expression in (*expressions, *(["|".join(named)] if named else []))]
