"""Defines the interface of a linear recurrence: how tokens change a state, and what is read from it."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mini_infer_engine.ops.recurrence.chunks import Chunks


class Rule(Protocol):
    """A recurrence over tokens. `inputs` are tensors whose first dimension is tokens."""

    def scan(self, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the outputs of one sequence's next tokens [tokens, ...], and its state after them, given its state
        before them, which is not changed.
        """

    def step(self, states: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the outputs of one token in each of several sequences [sequences, ...], and their states after it,
        given those before it, which are not changed.
        """


@dataclass(frozen=True, slots=True)
class LinearInputs:
    """The inputs of a linear recurrence in fp32, of which all rules have these. Tensors are contiguous."""

    q: Tensor  # [tokens, key_heads, key_dim], by which the state is read
    k: Tensor  # [tokens, key_heads, key_dim], the place of the value in the state
    v: Tensor  # [tokens, heads, value_dim]; heads are a multiple of key_heads
    log_decay: Tensor  # [tokens, heads], the logarithm of what is left of the state
    strength: Tensor | None  # [tokens, heads] of the delta rule; None: the value itself is added

    def of(self, tokens: slice) -> "LinearInputs":
        """Returns the inputs of these tokens."""
        strength = None if self.strength is None else self.strength[tokens]
        return LinearInputs(self.q[tokens], self.k[tokens], self.v[tokens], self.log_decay[tokens], strength)


@dataclass(frozen=True, slots=True)
class ChunkedInputs:
    """A scan's inputs in chunks, with all that does not depend on the state."""

    chunks: Chunks
    values: Tensor  # [chunks, heads, tokens, value_dim], added if the state at the chunk's begin is zero
    corrections: Tensor | None  # [chunks, heads, tokens, key_dim], how that state changes them; None: not at all


class LinearRule(Rule, Protocol):
    """A `Rule` whose state is a matrix for each head, [heads, key_dim, value_dim] fp32."""

    def prepare(self, *inputs: Tensor) -> LinearInputs:
        """Returns the inputs as kernels read them."""

    def in_chunks(self, inputs: LinearInputs) -> ChunkedInputs:
        """Returns the inputs of one sequence's tokens in chunks."""
