"""Log probabilities in OpenAI's two shapes and in vLLM's one for prompts. Knows no stream and no choice."""

from collections.abc import Sequence
from typing import Any

from mini_infer_engine.core.request import TokenLogprobs
from mini_infer_engine.text.detokenizer import Decoder

LEAST_LOGPROB = -9999.0
"""For minus infinity, which JSON has not; OpenAI's and vLLM's number."""


class TokenNames:
    """Tokens as answers write them: their text, or their ids where a client asks for these."""

    def __init__(self, decoder: Decoder | None, *, as_ids: bool) -> None:
        self._decoder = decoder
        self._as_ids = as_ids

    def of(self, token_id: int) -> str:
        """One token."""
        if self._as_ids or self._decoder is None:
            return f"token_id:{token_id}"
        return self._decoder.decode([token_id], skip_special_tokens=False)


def chat_logprobs(positions: Sequence[TokenLogprobs], names: TokenNames) -> dict[str, Any]:
    """Of a chat's tokens: `logprobs` of a choice, or of a delta."""
    return {"content": [_chat_position(position, names) for position in positions], "refusal": None}


def _chat_position(position: TokenLogprobs, names: TokenNames) -> dict[str, Any]:
    top = zip(position.top_token_ids, position.top_logprobs, strict=True)
    return _named(names.of(position.token_id), position.logprob) | {
        "top_logprobs": [_named(names.of(token_id), logprob) for token_id, logprob in top]
    }


def _named(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": _finite(logprob), "bytes": list(token.encode("utf-8", "replace"))}


class CompletionLogprobs:
    """`logprobs` of a completion's choice, whose offsets go on from chunk to chunk."""

    def __init__(self, names: TokenNames, told: Sequence[int] = ()) -> None:
        """`told`: token ids of the output that another engine has told of; the offsets go on behind them."""
        self._names = names
        self._offset = sum(len(names.of(token_id)) for token_id in told)

    def of_prompt(self, token_ids: Sequence[int], positions: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """An echoed prompt's: there is none of its first token."""
        first = self._entry(token_ids[0], None)
        return _joined([first, *(self._entry(position.token_id, position) for position in positions)])

    def of_output(self, positions: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The next tokens'."""
        return _joined([self._entry(position.token_id, position) for position in positions])

    def _entry(self, token_id: int, position: TokenLogprobs | None) -> tuple[int, str, float | None, Any]:
        token, offset = self._names.of(token_id), self._offset
        self._offset += len(token)
        if position is None:
            return offset, token, None, None
        own = {token: _finite(position.logprob)}  # first, as vLLM has it
        top = {
            self._names.of(top_id): _finite(logprob)
            for top_id, logprob in zip(position.top_token_ids, position.top_logprobs, strict=True)
        }
        return offset, token, _finite(position.logprob), own | top | own


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two parts of a completion's log probabilities, one after the other."""
    return {name: first[name] + second[name] for name in first}


def _joined(entries: Sequence[tuple[int, str, float | None, Any]]) -> dict[str, Any]:
    offsets, tokens, logprobs, tops = zip(*entries, strict=True) if entries else ((), (), (), ())
    return {
        "text_offset": list(offsets),
        "token_logprobs": list(logprobs),
        "tokens": list(tokens),
        "top_logprobs": list(tops),
    }


def prompt_logprobs(positions: Sequence[TokenLogprobs], decoder: Decoder | None) -> list[Any]:
    """VLLM's `prompt_logprobs`: null for the first token, then a table by token id for each."""
    return [None, *(_by_token_id(position, decoder) for position in positions)]


def _by_token_id(position: TokenLogprobs, decoder: Decoder | None) -> dict[str, dict[str, Any]]:
    ranked = [
        (position.token_id, position.logprob, position.rank),
        *zip(position.top_token_ids, position.top_logprobs, range(1, len(position.top_token_ids) + 1), strict=True),
    ]
    return {
        str(token_id): {
            "logprob": _finite(logprob),
            "rank": rank,
            "decoded_token": None if decoder is None else decoder.decode([token_id], skip_special_tokens=False),
        }
        for token_id, logprob, rank in ranked
    }


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
