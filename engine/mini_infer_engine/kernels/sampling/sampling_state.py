"""Defines sampling parameters and progress of every slot, on the device."""

from dataclasses import dataclass

import torch

SUPPRESSED_WIDTH = 32
"""Token ids that one slot can suppress on the device (EOS and stop tokens before min_tokens)."""

HOST_RING_DEPTH = 2
"""Depth of a slot's ring of tokens for the host, which reads a pass's before it launches the pass after the next.

The place is the remainder of `samplings`, which the host counts too: it does not know an output index while guesses of
a pass in flight may be wrong.
"""


@dataclass(slots=True)
class SamplingState:
    """The sampling state of every slot, on the device; the extra last slot is that of padded rows."""

    last_tokens: torch.Tensor  # [slots] int64
    positions: torch.Tensor  # [slots] int32, of the last token in the text: rotation and history go by it
    kv_lengths: torch.Tensor  # [slots] int32, tokens in the KV cache before it: the last token's cache index
    noise_seeds: torch.Tensor  # [slots] int64, sampler.noise_base of the request's seed
    output_indexes: torch.Tensor  # [slots] int32
    samplings: torch.Tensor  # [slots] int32, passes that have sampled one token, from the first one's output index on
    inverse_temperatures: torch.Tensor  # [slots] fp32, 0: greedy
    top_ks: torch.Tensor  # [slots] int32, 0: off
    top_ps: torch.Tensor  # [slots] fp32, 1: off
    min_ps: torch.Tensor  # [slots] fp32, 0: off
    suppress_until: torch.Tensor  # [slots] int32, output index from which all tokens are allowed
    suppressed: torch.Tensor  # [slots, SUPPRESSED_WIDTH] int32, -1: none
    on_host: torch.Tensor  # [slots, HOST_RING_DEPTH] int64, pinned: the token of a sampling, at its remainder

    @classmethod
    def zeros(cls, slots: int, device: torch.device) -> "SamplingState":
        """Returns the state of greedy rows with nothing in the KV cache, at position 0."""

        def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros((slots, *shape), dtype=dtype, device=device)

        return cls(
            last_tokens=make(torch.int64),
            positions=make(torch.int32),
            kv_lengths=make(torch.int32),
            noise_seeds=make(torch.int64),
            output_indexes=make(torch.int32),
            samplings=make(torch.int32),
            inverse_temperatures=make(torch.float32),
            top_ks=make(torch.int32),
            top_ps=make(torch.float32) + 1,
            min_ps=make(torch.float32),
            suppress_until=make(torch.int32),
            suppressed=make(torch.int32, SUPPRESSED_WIDTH) - 1,
            on_host=torch.zeros((slots, HOST_RING_DEPTH), dtype=torch.int64, pin_memory=device.type == "cuda"),
        )
