"""What a forward pass made, as plain data: the only thing that crosses from a runner back to the engine. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mini_infer_engine.core.request import TokenLogprobs


@dataclass(slots=True)
class PassResult:
    """Lists have one entry for each row of the batch, in its order."""

    tokens: list[Sequence[int]]
    """Tokens that each row sampled, in order; none where a chunk is not the last of its prompt."""
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """By row, of each of its tokens; only of rows whose request asks for them."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """By row, of each of the row's `prompt_targets`."""
    embeddings: dict[int, bytes] = field(default_factory=dict)
    """By row, of those with `embeds`: the last token's hidden state after the last norm, of length 1; packed fp32."""
