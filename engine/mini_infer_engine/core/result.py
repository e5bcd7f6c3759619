"""Defines the result of a forward pass: the only data that crosses from a runner back to the engine. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mini_infer_engine.core.request import TokenLogprobs


@dataclass(slots=True)
class PassResult:
    """Results of one pass. Lists have one entry for each row of the batch, in its order."""

    tokens: list[Sequence[int]]
    """Tokens that each row sampled, in order; empty for a chunk that is not the last of its prompt."""
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Maps rows to log probabilities of each of their tokens, only for rows whose request asks for them."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Maps rows to log probabilities of each of their `prompt_targets`."""
    embeddings: dict[int, bytes] = field(default_factory=dict)
    """Maps rows with `embeds` to what the pooler makes of their last token, as packed fp32."""
    swap_faults: Sequence[int] = ()
    """Places in the batch's `swap_in`, which its `states_in` follow, of pages and states that came back from main
    memory with other bytes than those that had left the device.
    """

    def drop(self, row: int) -> None:
        """Removes what a row has made."""
        self.tokens[row] = ()
        for made in (self.logprobs, self.prompt_logprobs, self.embeddings):
            made.pop(row, None)
