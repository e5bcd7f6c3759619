"""Computes linear recurrences in plain torch, for any device: from chunk to chunk, and token by token."""

import torch
from torch import Tensor

from mini_infer_engine.ops.recurrence.rule import ChunkedInputs, LinearInputs


def scan_chunks(inputs: ChunkedInputs, state: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Returns the outputs [tokens, heads, value_dim] of one sequence and its state after them, both fp32."""
    chunks, corrections, outputs = inputs.chunks, inputs.corrections, []
    for chunk, values in enumerate(inputs.values):
        added = values if corrections is None else values - corrections[chunk] @ state
        outputs.append(chunks.queries[chunk] @ state + chunks.within[chunk] @ added)
        state = state * chunks.kept[chunk] + chunks.keys[chunk].mT @ added
    return torch.stack(outputs).transpose(1, 2).flatten(0, 1)[:num_tokens], state


def update_states(inputs: LinearInputs, states: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the outputs [sequences, heads, value_dim] of one token in each sequence and the states after it, both
    fp32.
    """
    repeats = inputs.v.shape[1] // inputs.k.shape[1]
    q, k = (x if repeats == 1 else x.repeat_interleave(repeats, dim=1) for x in (inputs.q, inputs.k))
    states = states * inputs.log_decay.exp()[..., None, None]
    added = inputs.v
    if inputs.strength is not None:
        added = (added - (states * k.unsqueeze(-1)).sum(dim=-2)) * inputs.strength.unsqueeze(-1)
    states = torch.addcmul(states, k.unsqueeze(-1), added.unsqueeze(-2))
    return (states * q.unsqueeze(-1)).sum(dim=-2), states
