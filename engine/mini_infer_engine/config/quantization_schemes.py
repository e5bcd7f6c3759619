"""Which quantisation scheme each linear layer of a checkpoint has, by its name. Knows neither torch nor any format."""

import re
from dataclasses import dataclass
from fnmatch import translate
from functools import cache
from typing import Literal

from mini_infer_engine.config.fp4_quantization import Fp4Scheme
from mini_infer_engine.config.integer_quantization import IntegerScheme

Strategy = Literal["tensor", "channel", "block"]
ALL_LINEAR = "Linear"
"""The target that is every linear layer: torch's class, in compressed-tensors' words."""


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """Weights in float8 e4m3fn with scales; activations stay in the model's dtype."""

    strategy: Strategy
    """One scale a tensor, one a row of the weight, or one a block."""
    block: tuple[int, int]
    """Rows and columns that share a scale, with strategy "block"."""
    scale_name: str
    """Of the scales beside `weight` in the checkpoint."""


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
        if self.target.startswith("re:"):
            return re.match(self.target[3:], layer) is not None
        return self.target in (ALL_LINEAR, layer)


@dataclass(frozen=True, slots=True)
class Schemes:
    """Of a checkpoint's linear layers; nearly always one for all."""

    rules: tuple[Rule, ...]
    """The first that names a layer is the layer's."""
    ignored: tuple[str, ...] = ()
    """Layers that are not quantised, whatever the rules say: names, beginnings of names, or patterns."""

    @classmethod
    def of_all(cls, scheme: Scheme, ignored: tuple[str, ...]) -> "Schemes":
        """One for all linear layers but those that are ignored."""
        return cls((Rule(ALL_LINEAR, scheme),), ignored)

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
        return any(pattern.match(layer) for pattern in _compiled(self.ignored))

    def _rule_of(self, layer: str) -> Rule | None:
        if self._ignores(layer):
            return None
        return next((rule for rule in self.rules if rule.is_of(layer)), None)


@cache  # a mixture has tens of thousands of layers
def _compiled(patterns: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    """Each regular expression, and one for all names, beginnings of names and patterns with wildcards."""
    begin = "re:"
    named = [f"{re.escape(name)}(\\.|$)|{translate(name)}" for name in patterns if not name.startswith(begin)]
    expressions = [pattern.removeprefix(begin) for pattern in patterns if pattern.startswith(begin)]
    return tuple(re.compile(expression) for expression in (*expressions, *(["|".join(named)] if named else [])))
