"""Computes the selective state space of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060).

A head's state S maps input vectors B to values: S <- a S + B v^T, where v is the token's input times its time step; the
output is S^T C. So C, B and v are what queries, keys and values are in linear attention.
"""

from torch import Tensor

from mini_infer_engine.ops.recurrence.chunks import Chunks, split_chunks
from mini_infer_engine.ops.recurrence.linear_rule import scan_chunks, update_states
from mini_infer_engine.ops.recurrence.rule import ChunkedInputs, LinearInputs


class StateSpaceRule:
    """The `LinearRule` over C and B [tokens, groups, state_size], values v [tokens, heads, head_dim] fp32, and the
    logarithm of the decay a [tokens, heads] fp32. Several heads share the vectors of a group. Outputs have the shape of
    values.
    """

    def prepare(self, *inputs: Tensor) -> LinearInputs:
        """Converts the vectors to fp32."""
        q, k, v, log_decay = (x.float().contiguous() for x in inputs)
        return LinearInputs(q, k, v, log_decay, None)

    def in_chunks(self, inputs: LinearInputs) -> ChunkedInputs:
        """Computes the products within chunks."""
        repeats = inputs.v.shape[1] // inputs.k.shape[1]
        q, k = (split_chunks(x, repeats) for x in (inputs.q, inputs.k))
        return ChunkedInputs(Chunks.of(q, k, split_chunks(inputs.log_decay)), split_chunks(inputs.v), None)

    def scan(self, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Follows the state from chunk to chunk."""
        return scan_chunks(self.in_chunks(self.prepare(*inputs)), state, len(inputs[2]))

    def step(self, states: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Updates each state by one token, as the rule says."""
        return update_states(self.prepare(*inputs), states)


STATE_SPACE_RULE = StateSpaceRule()
