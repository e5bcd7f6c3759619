"""Computes the gated delta rule (Yang et al. 2024, Gated DeltaNet, arXiv 2412.06464).

A head's state S maps keys to values. A token decays it, and moves what it returns for the token's key towards the
token's value: S <- a S, then S <- S + b k (v - S^T k)^T; the output is S^T q. Within a chunk these updates depend on
each other by a triangular system, which is solved for all chunks at once (Yang et al. 2024, DeltaNet, arXiv 2406.06484,
section 3).
"""

import torch
from torch import Tensor

from mini_infer_engine.ops.recurrence.chunks import Chunks, split_chunks
from mini_infer_engine.ops.recurrence.linear_rule import scan_chunks, update_states
from mini_infer_engine.ops.recurrence.rule import ChunkedInputs, LinearInputs

_EPS = 1e-6
"""The epsilon of the norms of queries and keys."""


class GatedDeltaRule:
    """The `LinearRule` over queries and keys [tokens, key_heads, key_dim], values [tokens, value_heads, value_dim], the
    logarithm of the decay a [tokens, value_heads] fp32 and the strength b of the update [tokens, value_heads].

    Queries and keys are normalised here, and shared by several value heads. Outputs have the shape and dtype of values.
    """

    def prepare(self, *inputs: Tensor) -> LinearInputs:
        """Normalises queries and keys."""
        q, k, v, log_decay, strength = (x.float().contiguous() for x in inputs)
        q, k = (x * (x.square().sum(dim=-1, keepdim=True) + _EPS).rsqrt() for x in (q, k))
        return LinearInputs(q * q.shape[-1] ** -0.5, k, v, log_decay, strength)

    def in_chunks(self, inputs: LinearInputs) -> ChunkedInputs:
        """Solves the system of each chunk."""
        assert inputs.strength is not None, "the delta rule has strengths"
        repeats = inputs.v.shape[1] // inputs.k.shape[1]
        q, k = (split_chunks(x, repeats) for x in (inputs.q, inputs.k))
        v, log_decay, strength = (split_chunks(x) for x in (inputs.v, inputs.log_decay, inputs.strength))
        chunks = Chunks.of(q, k, log_decay)
        weighted = k * strength.unsqueeze(-1)
        right = torch.cat((v * strength.unsqueeze(-1), weighted * chunks.from_begin), dim=-1)
        # The system is I plus what is strictly below the diagonal, which is all that is read of it.
        system = (weighted @ k.mT) * chunks.decay
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        values, corrections = torch.split(solved, [v.shape[-1], k.shape[-1]], dim=-1)
        return ChunkedInputs(chunks, values, corrections)

    def scan(self, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Solves the chunks, and then follows the state from one to the next."""
        v = inputs[2]
        out, state = scan_chunks(self.in_chunks(self.prepare(*inputs)), state, len(v))
        return out.to(v.dtype), state

    def step(self, states: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Updates each state by one token, as the rule says."""
        out, states = update_states(self.prepare(*inputs), states)
        return out.to(inputs[2].dtype), states


GATED_DELTA_RULE = GatedDeltaRule()
