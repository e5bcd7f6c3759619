"""Log probabilities in OpenAI's two shapes and in vLLM's one for prompts. Knows no stream and no choice."""

import codecs
from collections.abc import Sequence
from typing import Any

from mini_infer_engine.core.request import TokenLogprobs
from mini_infer_engine.text.detokenizer import Decoder, Detokenizer
from mini_infer_engine.text.token_bytes import TokenBytes

LEAST_LOGPROB = -9999.0
"""Number for minus infinity, which JSON has not; OpenAI's and vLLM's."""


class TokenNames:
    r"""Names of tokens in answers: their text, or their ids if a client requests these.

    A token that is part of a character is written as its bytes, as OpenAI writes it: "\xe6\x97".
    """

    def __init__(self, decoder: Decoder | None, *, as_ids: bool) -> None:
        self.decoder = decoder
        self._bytes = None if as_ids or decoder is None else TokenBytes(decoder)

    def of(self, token_id: int) -> str:
        """Returns the name of one token."""
        return self.named(token_id)[0]

    def named(self, token_id: int) -> tuple[str, bytes]:
        """Returns the name of one token and its own bytes, which of several tokens joined are those of the text."""
        if self._bytes is None:
            name = f"token_id:{token_id}"
            return name, name.encode()
        own = self._bytes.of(token_id)
        try:
            return own.decode(), own
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in own), own

    def piece(self, token_id: int) -> str:
        """Returns the token as the vocabulary writes it: no other token is written so."""
        return (self._bytes and self._bytes.piece(token_id)) or f"token_id:{token_id}"


def chat_logprobs(positions: Sequence[TokenLogprobs], names: TokenNames) -> dict[str, Any]:
    """Returns the `logprobs` of a chat's choice, or of a delta."""
    return {"content": [_chat_position(position, names) for position in positions], "refusal": None}


def _chat_position(position: TokenLogprobs, names: TokenNames) -> dict[str, Any]:
    top = zip(position.top_token_ids, position.top_logprobs, strict=True)
    return _named(names.named(position.token_id), position.logprob) | {
        "top_logprobs": [_named(names.named(token_id), logprob) for token_id, logprob in top]
    }


def _named(named: tuple[str, bytes], logprob: float) -> dict[str, Any]:
    token, own = named
    return {"token": token, "logprob": _finite(logprob), "bytes": list(own)}


class CompletionLogprobs:
    """The `logprobs` of a completion's choice, whose offsets go on from chunk to chunk.

    Offsets count characters of the choice's text: each token begins where the text of those before it ends.
    """

    def __init__(
        self, names: TokenNames, prompt: Sequence[int], resumed: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        """Takes in `resumed` the token ids of output that another engine has sent; the offsets go on behind them."""
        self._names = names
        self._prompt = prompt
        self._detokenizer = None
        if names.decoder is not None:
            self._detokenizer = Detokenizer(names.decoder, skip_special_tokens, prompt)
        self._offset = 0
        for token_id in resumed:
            self._advance(token_id)

    def of_prompt(self, positions: Sequence[TokenLogprobs], text: str) -> dict[str, Any]:
        """Returns those of an echoed prompt, whose first token has none. `text`: the prompt as it is echoed."""
        offsets = prompt_offsets(self._names.decoder, self._prompt, text)
        self._offset = len(text)
        padded: list[TokenLogprobs | None] = [None, *positions]
        return _joined(
            [
                self._entry(token_id, position, offset)
                for token_id, position, offset in zip(self._prompt, padded, offsets, strict=False)
            ]
        )

    def of_output(self, positions: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Returns those of the next tokens."""
        return _joined(
            [self._entry(position.token_id, position, self._advance(position.token_id)) for position in positions]
        )

    def _advance(self, token_id: int) -> int:
        """Returns the offset at which this token of the output begins."""
        offset = self._offset
        if self._detokenizer is not None:
            self._offset += len(self._detokenizer.push(token_id))
        return offset

    def _entry(
        self, token_id: int, position: TokenLogprobs | None, offset: int
    ) -> tuple[int, str, float | None, dict[str, float] | None]:
        token = _completion_name(self._names.named(token_id))
        if position is None:
            return offset, token, None, None
        ranked = zip(
            (position.token_id, *position.top_token_ids), (position.logprob, *position.top_logprobs), strict=True
        )
        top: dict[str, float] = {}  # the token's own first, as vLLM has it
        named: dict[str, int] = {}
        for top_id, logprob in ranked:
            name = _completion_name(self._names.named(top_id))
            if named.setdefault(name, top_id) != top_id:  # "a" and the byte <0x61>
                name = self._names.piece(top_id)
            top.setdefault(name, _finite(logprob))
        return offset, token, _finite(position.logprob), top


def _completion_name(named: tuple[str, bytes]) -> str:
    name, own = named
    return name if name.encode() == own else f"bytes:{name}"


def prompt_offsets(decoder: Decoder | None, token_ids: Sequence[int], text: str) -> list[int]:
    """Returns the offset of each token of a prompt in its text, which may lack spaces and special tokens that were
    added.
    """
    if decoder is None:
        return [0] * len(token_ids)
    own, unfinished, offset, offsets = TokenBytes(decoder), codecs.getincrementaldecoder("utf-8")("replace"), 0, []
    for token_id in token_ids:
        offsets.append(min(offset, len(text)))
        piece = unfinished.decode(own.of(token_id))
        if text.startswith(piece, offset):
            offset += len(piece)
        elif text.startswith(piece.removeprefix(" "), offset):  # a prefix space of the tokenizer's
            offset += len(piece.removeprefix(" "))
        elif decoder.decode([token_id], skip_special_tokens=True):  # normalised text, whose lengths are a guess
            offset += len(piece)
    return offsets


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Returns two parts of a completion's log probabilities, one after the other."""
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
    """Returns vLLM's `prompt_logprobs`: null for the first token, then a table by token id for each."""
    own = None if decoder is None else TokenBytes(decoder)
    return [None, *(_by_token_id(position, own) for position in positions)]


def _by_token_id(position: TokenLogprobs, own: TokenBytes | None) -> dict[str, dict[str, Any]]:
    ranked = [
        (position.token_id, position.logprob, position.rank),
        *zip(position.top_token_ids, position.top_logprobs, range(1, len(position.top_token_ids) + 1), strict=True),
    ]
    return {
        str(token_id): {
            "logprob": _finite(logprob),
            "rank": rank,
            "decoded_token": None if own is None else own.text(token_id),
        }
        for token_id, logprob, rank in ranked
    }


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
