"""Turns one sequence's outputs of the core into deltas and an end, on the text side. Knows neither HTTP nor ZMQ.

Stop strings are found here, so a reply may be finished while the core still works: then `needs_abort` is True. If the
request has a parser, text is also reported in its parts: thinking, answer, tool calls.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from mini_infer_engine.core.request import (
    CachedTokens,
    FinishReason,
    Output,
    RepetitionDetectionParams,
    Request,
    TokenLogprobs,
)
from mini_infer_engine.parsing.base import OutputParser, ParsedOutput, Part
from mini_infer_engine.text.detokenizer import Decoder, Detokenizer
from mini_infer_engine.text.repetition import REPETITION, repeats
from mini_infer_engine.text.stop_strings import StopStrings

EndReason = FinishReason | Literal["tool_calls"]
"""Reasons why a text ended, as reported to clients: the core's reason, or tool_calls if it stopped after tool calls."""


class Delta(msgspec.Struct, gc=False):
    """The text and tokens that one step added to one choice, to be rendered for a client."""

    text: str
    token_ids: list[int]
    index: int = 0
    """Index of the choice in its request; the caller that pushes outputs fills it."""
    finish_reason: EndReason | None = None
    """Set in the last delta of a choice, together with `stop_reason`."""
    stop_reason: int | str | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    """Log probabilities at each of `token_ids`, if requested."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """Log probabilities of prompt tokens from the second on, as far as they have become known."""
    parts: list[Part] = []
    """Parts that have become certain, if the request has a parser. Without one, `text` is the answer."""


class OutputText:
    """Text, tokens and end of one sequence as they are known so far."""

    def __init__(self, request: Request, decoder: Decoder | None, parser: OutputParser | None = None) -> None:
        sampling = request.sampling
        self.request = request
        self.token_ids: list[int] = []
        """Tokens that count: none after the one that completed a stop string."""
        self.finish_reason: EndReason | None = None
        self.stop_reason: int | str | None = None
        """The stop token id or the stop string that ended it; None for EOS and length."""
        self.error = ""
        self.is_refused = False
        """True if it ended with an error that is the request's fault."""
        self.retry_after_s: float | None = None
        """The seconds, beside an error, after which its latency targets could be met; None if those are not the
        reason.
        """
        self.num_cached_tokens = 0
        self.cached_tokens: CachedTokens | None = None
        """The media of the cached tokens, set with the first token if the prefix cache has tiers."""
        self.logprobs: list[TokenLogprobs] = []
        """Log probabilities at each of `token_ids`, if requested."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Log probabilities of the prompt's tokens from the second on."""
        self.embedding = b""
        """Packed fp32 numbers, if an embedding is requested."""
        self.cumulative_logprob: float | None = None
        """The cumulative log probability of a beam."""
        self.beam_score: float | None = None
        self.kv_transfer_params: dict[str, Any] | None = None
        """Location of the prompt's keys and values, for another engine."""
        self.first_token_s: float | None = None
        """Seconds from the request's arrival to its first token, measured by the caller that pushes outputs.
        `last_token_s` is that of the last token so far.
        """
        self.last_token_s: float | None = None
        self.queue_time_s: float | None = None
        """Seconds for which it waited to run, set once it has ended."""
        self.needs_abort = False
        self.parsed = None if parser is None else ParsedOutput()
        """The parts of the text; None without a parser."""
        self._parser = parser
        self._pieces: list[str] = []
        self._detokenizer = (
            Detokenizer(decoder, sampling.skip_special_tokens, request.prompt_token_ids)
            if decoder is not None and sampling.detokenize
            else None
        )
        self._stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output)
        self._repetition = sampling.repetition_detection
        self._searches_text = parser is not None or bool(sampling.stop)
        self.resumed: Delta | None = None
        """The text that another engine has sent already, for a renderer that must know where to continue."""
        if request.resumed_token_ids:
            # What these tokens say was told already; what they leave unfinished, characters and stop strings, was not.
            resumed = Output(request_id=request.request_id, token_ids=list(request.resumed_token_ids))
            self.resumed = self.push(resumed)

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._pieces)

    def push(self, output: Output) -> Delta:
        """Takes the output of a step. Outputs after the end are dropped."""
        if self.finish_reason is not None:
            return Delta("", [])
        if output.num_cached_tokens:
            self.num_cached_tokens = output.num_cached_tokens
        self.cached_tokens = output.cached_tokens or self.cached_tokens
        is_repetition = False
        if self._repetition is not None:
            output, is_repetition = self._until_repetition(output, self._repetition)
        delta = self._push_tokens(output)
        if output.finish_reason is not None and self.finish_reason is None:
            self._take_end(output, is_repetition=is_repetition)
        if delta.text:
            self._pieces.append(delta.text)
        self.token_ids += delta.token_ids
        if self.parsed is not None:
            self._end_parsing(self.parsed, delta)
        if output.logprobs:
            delta.logprobs = output.logprobs[: len(delta.token_ids)]
            self.logprobs += delta.logprobs
        if output.prompt_logprobs:
            delta.prompt_logprobs = output.prompt_logprobs
            self.prompt_logprobs += output.prompt_logprobs
        if self.finish_reason is not None:
            delta.finish_reason, delta.stop_reason = self.finish_reason, self.stop_reason
        return delta

    def _take_end(self, output: Output, *, is_repetition: bool) -> None:
        """Ends with the core's last output: nothing in the text has ended it before."""
        self.finish_reason, self.error = output.finish_reason, output.error
        self.stop_reason = REPETITION if is_repetition else output.stop_reason
        self.needs_abort = is_repetition
        self.is_refused = output.is_refusal
        self.retry_after_s = output.retry_after_s
        self.embedding = output.embedding
        self.cumulative_logprob, self.beam_score = output.cumulative_logprob, output.beam_score
        self.queue_time_s = output.queue_time_s
        self.kv_transfer_params = output.kv_transfer_params

    def _until_repetition(self, output: Output, params: RepetitionDetectionParams) -> tuple[Output, bool]:
        """Returns the output up to where it repeats itself, with that as its end, and True if it does."""
        for end in range(1, len(output.token_ids) + 1):
            has_ended = output.finish_reason is not None and end == len(output.token_ids)
            if not has_ended and repeats(self.token_ids + output.token_ids[:end], params):
                cut = output.token_ids[:end]
                return msgspec.structs.replace(output, token_ids=cut, finish_reason="repetition"), True
        return output, False

    def _push_tokens(self, output: Output) -> Delta:
        detokenizer, sampling = self._detokenizer, self.request.sampling
        if detokenizer is None:
            return Delta("", output.token_ids)
        if output.finish_reason is None and not self._searches_text:
            return Delta("".join([detokenizer.push(token_id) for token_id in output.token_ids]), output.token_ids)
        text, parts = "", list[Part]()
        shown = output.token_ids
        if output.finish_reason == "stop" and not (sampling.include_stop_str_in_output or output.ends_in_text):
            shown = shown[:-1]
        for index, token_id in enumerate(shown):
            fresh = detokenizer.push(token_id)
            # Text of the first min_tokens tokens can be no part of a stop string.
            fresh = fresh if len(self.token_ids) + index < sampling.min_tokens else self._stops.push(fresh)
            text += fresh
            parts += self._parse(fresh)
            if self._stops.matched is not None:
                self._end_at_stop_string(abort=output.finish_reason is None or index + 1 < len(output.token_ids))
                return Delta(text, output.token_ids[: index + 1], parts=parts)
        if output.finish_reason is not None:
            rest = self._stops.push(detokenizer.flush(drop_unfinished=output.finish_reason == "length"))
            if self._stops.matched is not None:
                self._end_at_stop_string(abort=False)
            rest += self._stops.flush()
            text += rest
            parts += self._parse(rest, counts=False)
        return Delta(text, output.token_ids, parts=parts)

    def _parse(self, fresh: str, *, counts: bool = True) -> list[Part]:
        """Returns the parts that a token's text completes. It is a thinking token if it begins and ends within."""
        parser, parsed = self._parser, self.parsed
        if parser is None or parsed is None:
            return []
        was_reasoning = parser.is_reasoning
        parts = parser.push(fresh) if fresh else []
        if counts and was_reasoning and parser.is_reasoning:
            parsed.reasoning_tokens += 1
        return parts

    def _end_parsing(self, parsed: ParsedOutput, delta: Delta) -> None:
        if self.finish_reason is not None and self._parser is not None:
            delta.parts = [*delta.parts, *self._parser.finish()]
        parsed.add(delta.parts)
        if self.finish_reason == "stop" and parsed.tool_calls:
            self.finish_reason = "tool_calls"

    def _end_at_stop_string(self, abort: bool) -> None:
        self.finish_reason, self.stop_reason, self.needs_abort = "stop", self._stops.matched, abort
