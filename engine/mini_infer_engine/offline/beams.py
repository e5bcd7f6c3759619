"""Parameters and results of beam search in the offline API, with vLLM's names. It runs nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from mini_infer_engine.core.request import BeamSearch, EarlyStopping, Request, SamplingParams


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """One token at one position. There are thousands, which the garbage collector need not look at."""

    logprob: float
    rank: int | None
    """Rank of the token, 1 for the most likely; None if not known, for a token that was named."""
    decoded_token: str | None
    """Text of the token; None without a tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search. `early_stopping` is transformers', all else vLLM's."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Accepted without effect, as in vLLM: beams are ranked by the model's own probabilities."""
    length_penalty: float = 1.0
    """A beam's score is its cumulative log probability divided by its number of output tokens to this power."""
    include_stop_str_in_output: bool = False
    early_stopping: EarlyStopping = False
    """True ends the search as soon as `beam_width` beams have ended; False uses a heuristic; "never" searches until
    none can become better.
    """

    def __post_init__(self) -> None:
        """Raises ValueError if there is no beam to look for."""
        if self.beam_width < 1:
            raise ValueError(f"beam_width is {self.beam_width}; it must be at least 1")

    def sampling(self) -> SamplingParams:
        """Returns the sampling parameters of each beam."""
        return SamplingParams(temperature=0.0, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos, logprobs=0)

    def requests(self, prompt_token_ids: Sequence[int], request_ids: list[str]) -> list[Request]:
        """Returns one request for each beam of one prompt, the first of which leads the search."""
        search = BeamSearch(
            request_ids=request_ids, length_penalty=self.length_penalty, early_stopping=self.early_stopping
        )
        return [
            Request(
                request_id=request_id,
                prompt_token_ids=prompt_token_ids,
                sampling=self.sampling(),
                beam_search=search,
            )
            for request_id in request_ids
        ]


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One beam."""

    tokens: list[int]
    """Token ids of the prompt and of the output."""
    logprobs: list[dict[int, Logprob]]
    """Log probabilities of each token of the output."""
    cum_logprob: float
    score: float
    """`cum_logprob` with the length penalty, by which beams are ranked."""
    text: str | None
    """Prompt and output, without special tokens; None without a tokenizer."""
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The result of a beam search for one prompt."""

    sequences: list[BeamSearchSequence]
    """Beams, the best first."""
