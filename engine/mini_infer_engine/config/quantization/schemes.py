"""Which quantisation scheme each linear layer of a checkpoint has, by its name. Knows neither torch nor any format."""

import re
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property
from typing import Literal

from mini_infer_engine.config.quantization.fp4 import Fp4Scheme
from mini_infer_engine.config.quantization.integer import IntegerScheme

Strategy = Literal["tensor", "channel", "block"]
ALL_LINEAR = "Linear"
"""The target that is every linear layer: torch's class, in compressed-tensors' words."""
PATTERN = "re:"
"""What a target begins with that is a regular expression."""


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """Weights in float8 e4m3fn with scales; activations stay in the model's dtype."""

    strategy: Strategy
    """One scale a tensor, one a row of the weight, or one a block."""
    block: tuple[int, int]
    """Rows and columns that share a scale, with strategy "block"."""
    scale_name: str
    """Of the scales beside `weight` in the checkpoint."""

    @property
    def name(self) -> str:
        """For people."""
        return f"fp8 by {self.strategy}"


Scheme = Fp8Scheme | IntegerScheme | Fp4Scheme


@dataclass(frozen=True, slots=True)
class Rule:
    """The scheme of the layers that a target names."""

    target: str
    """`ALL_LINEAR`, a layer's name in the checkpoint, or "re:" and a regular expression that matches its beginning."""
    scheme: Scheme | None
    """None: these layers are not quantised."""

    def is_of(self, layer: str) -> bool:
        """Whether the layer of this name is meant."""
        if self.target.startswith(PATTERN):
            return re.match(self.target.removeprefix(PATTERN), layer) is not None
        return self.target in (ALL_LINEAR, layer)


@dataclass(frozen=True)
class Schemes:
    """Of a checkpoint's linear layers; nearly always one for all."""

    rules: tuple[Rule, ...]
    """The one whose target is a layer's name is the layer's, else the first that means it."""
    ignored: tuple[str, ...] = ()
    """Layers that are not quantised, whatever the rules say: names, beginnings of names, or patterns."""

    @classmethod
    def of_all(cls, scheme: Scheme, ignored: tuple[str, ...]) -> "Schemes":
        """One for all linear layers but those that are ignored."""
        return cls((Rule(ALL_LINEAR, scheme),), ignored)

    @property
    def name(self) -> str:
        """For people: those of all schemes."""
        return ", ".join(dict.fromkeys(rule.scheme.name for rule in self.rules if rule.scheme is not None))

    def scheme_of(self, layer: str) -> Scheme | None:
        """Of the layer that the checkpoint calls so; None: it is not quantised."""
        rule = self._rule_of(layer)
        return None if rule is None else rule.scheme

    def reason_of(self, layer: str) -> str:
        """Why the layer has its scheme, for people: the target that names it."""
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
        """Each regular expression, and one for all names, beginnings of names and patterns with wildcards."""
        named = [f"{re.escape(name)}(\\.|$)|{translate(name)}" for name in self.ignored if not name.startswith(PATTERN)]
        expressions = [name.removeprefix(PATTERN) for name in self.ignored if name.startswith(PATTERN)]
        return [re.compile(expression) for expression in (*expressions, *(["|".join(named)] if named else []))]
