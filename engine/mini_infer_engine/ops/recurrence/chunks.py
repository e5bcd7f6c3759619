"""Brings a recurrence with decays into chunks: products within each chunk, and a state that goes from one to the next.

All linear rules share it: a state maps keys to values, every token decays it, adds its key with a value, and reads it
by its query. The form is that of Mamba-2 (Dao and Gu 2024, state space duality, arXiv 2405.21060, section 6) and of
flash-linear-attention (https://github.com/fla-org/flash-linear-attention).
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

CHUNK_SIZE = 64
"""Tokens of a chunk: within it the cost grows with its square, and between chunks there is a chain of products."""
_STEP = 16
"""Chunks of short sequences are multiples of it: kernels are compiled for each size."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """The parts of a scan that do not depend on the state, [chunks, heads, ...] fp32."""

    decay: Tensor  # [..., tokens, tokens], from a token to a later one of its chunk, with the later one's; 0 before it
    from_begin: Tensor  # [..., tokens, 1], from the chunk's begin to each token
    within: Tensor  # [..., tokens, tokens], what a token reads of earlier ones' values, and of its own
    queries: Tensor  # [..., tokens, key_dim], for the state at the chunk's begin
    keys: Tensor  # [..., tokens, key_dim], for the state at its end
    kept: Tensor  # [..., 1, 1], what is left of the state after the chunk

    @classmethod
    def of(cls, q: Tensor, k: Tensor, log_decay: Tensor) -> "Chunks":
        """Takes queries and keys [chunks, heads, tokens, key_dim], and logarithms [chunks, heads, tokens]."""
        total = log_decay.cumsum(dim=-1)
        decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
        from_begin = total.exp().unsqueeze(-1)
        return cls(
            decay=decay,
            from_begin=from_begin,
            within=(q @ k.mT) * decay,
            queries=q * from_begin,
            keys=k * (total[..., -1:] - total).exp().unsqueeze(-1),
            kept=total[..., -1].exp()[..., None, None],
        )


def split_chunks(x: Tensor, repeats: int = 1) -> Tensor:
    """Maps [tokens, heads, ...] to [chunks, heads * repeats, size, ...], each head repeated.

    Zeros fill the last chunk: a decay of 1, and no key. A short sequence is one smaller chunk.
    """
    size = min(CHUNK_SIZE, x.shape[0] + -x.shape[0] % _STEP)
    padded = functional.pad(x, (0, 0) * (x.ndim - 1) + (0, -x.shape[0] % size))
    chunks = padded.view(-1, size, *x.shape[1:]).transpose(1, 2)
    return chunks.contiguous() if repeats == 1 else chunks.repeat_interleave(repeats, dim=1)
