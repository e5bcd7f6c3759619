"""Turns the result of a committed pass into outputs, and tracks which requests still wait for their last one.

Knows neither passes nor runners. An output with a finish reason is the last of its request.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from mini_infer_engine.core.beam_search.group import BeamGroup
from mini_infer_engine.core.request import Output, TokenLogprobs
from mini_infer_engine.core.result import PassResult
from mini_infer_engine.core.scheduler import Scheduler
from mini_infer_engine.core.sequence import Sequence, State
from mini_infer_engine.core.step import Step

if TYPE_CHECKING:  # with numpy and llguidance, which the HTTP process needs not for its counters
    from mini_infer_engine.core.grammars.matcher import GrammarMatcher

Accept = Callable[[Sequence, Iterable[int], list[TokenLogprobs]], Output]
"""The signature of `OutputProcessor._accept` and `_accept_within_grammar`."""


class OutputProcessor:
    """The outputs of one engine's requests."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.sequences: dict[str, Sequence] = {}
        """The sequences of requests that have not had their last output, by request id."""
        self._beam_groups: dict[str, BeamGroup] = {}
        """The beam groups of requests with beam search, by request id."""
        self.num_constrained = 0
        """Number of `sequences` whose output must match a grammar."""
        self.num_tokens = 0
        """Tokens in all outputs since the start."""

    def expect(self, sequence: Sequence, beams: BeamGroup | None) -> None:
        """Registers a sequence, whose request gets outputs from now on."""
        request = sequence.request
        self.sequences[request.request_id] = sequence
        self.num_constrained += request.sampling.grammar is not None
        if beams is not None:
            self._beam_groups[request.request_id] = beams

    def remove(self, request_id: str) -> Sequence | None:
        """Unregisters a request, which gets no more outputs. Returns its sequence, or None if it had ended already."""
        sequence = self.sequences.pop(request_id, None)
        if sequence is not None:
            self.num_constrained -= sequence.request.sampling.grammar is not None
            self._beam_groups.pop(request_id, None)
        return sequence

    def end(self, sequence: Sequence) -> None:
        """Ends a sequence: it gets no more rows, and the output that is being made is its last."""
        self.remove(sequence.request.request_id)
        self._scheduler.leave(sequence, State.FINISHED)

    def take(self, step: Step, result: PassResult) -> list[Output]:
        """Returns the outputs of a committed pass. Leaving sequences are released when their last row is committed."""
        outputs: list[Output] = []
        num_tokens = 0
        running, finished = State.RUNNING, State.FINISHED
        masked = step.batch.waits_for_masks
        are_plain = not (result.logprobs or result.prompt_logprobs or result.embeddings or self._beam_groups)
        for row, (sequence, tokens) in enumerate(zip(step.sequences, result.tokens, strict=True)):
            sequence.in_flight -= 1
            if are_plain and sequence.state is running and len(tokens) == 1:  # nearly all rows of nearly all passes
                outputs.append((self._accept_masked_token if masked else self._accept_token)(sequence, tokens[0]))
                num_tokens += 1
                continue
            if sequence.state is not finished:  # else what it made is thrown away: it had ended
                if sequence.group is not None and not result.prompt_logprobs:
                    emitted = self._take_beam(sequence, result.logprobs.get(row))
                else:
                    emitted = self._outputs_of(
                        sequence, row, result, self._accept_within_grammar if masked else self._accept
                    )
                if emitted:  # one beam of many mostly has none
                    num_tokens += sum(len(output.token_ids) for output in emitted)
                    outputs += emitted
            if not sequence.in_flight and sequence.is_leaving:
                self._scheduler.release(sequence)
        self.num_tokens += num_tokens
        return outputs

    def _accept_token(self, sequence: Sequence, token: int) -> Output:
        """Does what `_accept` does for one token without log probabilities, faster."""
        token_ids = sequence.token_ids
        token_ids.append(token)
        if sequence.num_computed >= sequence.next_block_end:
            self._scheduler.kv_cache.cache_blocks(sequence)
        if token in sequence.stops or len(token_ids) > sequence.last_position + 1:
            return self._last_output(sequence, [token], [])
        if sequence.cached_tokens is not None:
            return self._first_output(sequence, [token], [])
        return Output(sequence.request.request_id, [token], sequence.num_cached or 0)

    def _accept_masked_token(self, sequence: Sequence, token: int) -> Output:
        """Does what `_accept_within_grammar` does for one token, faster: masks of the next pass wait for it."""
        matcher = sequence.matcher
        if matcher is None:
            return self._accept_token(sequence, token)
        if token in sequence.stops or not matcher.goes_on_after(token):
            return self._ended_by_grammar(sequence, matcher, self._accept(sequence, [token], []))
        return self._accept_token(sequence, token)

    def _accept(self, sequence: Sequence, tokens: Iterable[int], logprobs: list[TokenLogprobs]) -> Output:
        """Appends sampled tokens up to the first that ends the sequence; those after it are discarded."""
        accepted: list[int] = []
        for token in tokens:
            self._scheduler.append(sequence, token)
            accepted.append(token)
            if sequence.finish_reason(token) is not None:
                return self._last_output(sequence, accepted, logprobs[: len(accepted)])
        if sequence.cached_tokens is not None:
            return self._first_output(sequence, accepted, logprobs)
        return Output(sequence.request.request_id, accepted, sequence.num_cached or 0, logprobs=logprobs)

    def _first_output(self, sequence: Sequence, tokens: list[int], logprobs: list[TokenLogprobs]) -> Output:
        """Returns an output that reports where the sequence's cached tokens were."""
        cached_tokens, sequence.cached_tokens = sequence.cached_tokens, None
        num_cached = sequence.num_cached or 0
        return Output(sequence.request.request_id, tokens, num_cached, cached_tokens=cached_tokens, logprobs=logprobs)

    def _last_output(self, sequence: Sequence, tokens: list[int], logprobs: list[TokenLogprobs]) -> Output:
        """Returns the output of a sequence that ends with the last of these tokens."""
        reason = sequence.finish_reason(tokens[-1])
        self.end(sequence)
        return Output(
            sequence.request.request_id,
            tokens,
            sequence.num_cached or 0,
            finish_reason=reason,
            stop_reason=sequence.stop_reason(tokens[-1]) if reason == "stop" else None,
            queue_time_s=sequence.queue_time_s,
            cached_tokens=sequence.cached_tokens,
            logprobs=logprobs,
        )

    def accept_received(self, sequence: Sequence, token: int, logprobs: list[TokenLogprobs]) -> Output:
        """Appends a token that another engine has sampled after computing the prompt."""
        self.num_tokens += 1
        return self._accept_within_grammar(sequence, [token], logprobs)

    def _accept_within_grammar(
        self, sequence: Sequence, tokens: Iterable[int], logprobs: list[TokenLogprobs]
    ) -> Output:
        """Appends sampled tokens as `_accept` does. If the sequence has a grammar, the output ends where the grammar
        ends.
        """
        matcher = sequence.matcher
        if matcher is None:
            return self._accept(sequence, tokens, logprobs)
        accepted = []
        for token in tokens:
            accepted.append(token)
            if token in sequence.stops or not matcher.goes_on_after(token):
                break
        return self._ended_by_grammar(sequence, matcher, self._accept(sequence, accepted, logprobs[: len(accepted)]))

    def _ended_by_grammar(self, sequence: Sequence, matcher: "GrammarMatcher", output: Output) -> Output:
        """Marks the output as the last one if the grammar has come to its end or cannot continue."""
        if output.finish_reason is None and (matcher.error or matcher.has_ended):
            self.end(sequence)
        if matcher.error:
            return replace(output, finish_reason="error", error=matcher.error, is_refusal=matcher.is_too_complex)
        if matcher.has_ended and output.finish_reason != "stop":
            return replace(output, finish_reason="stop", ends_in_text=not matcher.is_end(output.token_ids[-1]))
        return output

    def _outputs_of(self, sequence: Sequence, row: int, result: PassResult, accept: Accept) -> list[Output]:
        """Returns the outputs of a row that may have other results than tokens."""
        outputs: list[Output] = []
        logprobs = result.logprobs.get(row)
        if row in result.prompt_logprobs:
            prompt_logprobs = result.prompt_logprobs[row]
            outputs.append(Output(sequence.request.request_id, [], prompt_logprobs=prompt_logprobs))
        if row in result.embeddings:
            outputs.append(self._embedded(sequence, result.embeddings[row]))
        elif sequence.group is not None:
            outputs += self._take_beam(sequence, logprobs)
        elif tokens := result.tokens[row]:
            outputs.append(accept(sequence, tokens, logprobs or []))
        return outputs

    def _take_beam(self, sequence: Sequence, token_logprobs: list[TokenLogprobs] | None) -> list[Output]:
        """Takes the candidates after one beam of a search, or None while only a part of its prompt is computed."""
        group = self._beam_groups.get(sequence.request.request_id)  # none of one that was preempted, and then aborted
        outputs = (
            group.take(sequence, token_logprobs[0], self._scheduler) if group is not None and token_logprobs else []
        )
        if outputs:
            self.end(sequence)
        return outputs

    def _embedded(self, sequence: Sequence, embedding: bytes) -> Output:
        """Ends a request for an embedding, which is now complete. The sampled token is discarded."""
        self.end(sequence)
        return Output(
            request_id=sequence.request.request_id,
            token_ids=[],
            finish_reason="stop",
            num_cached_tokens=sequence.num_cached or 0,
            queue_time_s=sequence.queue_time_s,
            cached_tokens=sequence.cached_tokens,
            embedding=embedding,
        )

    def refused(self, sequence: Sequence, reason: str) -> Output:
        """Returns the last output of a request that asks for what cannot be done."""
        request_id = sequence.request.request_id
        self.remove(request_id)
        return Output(request_id=request_id, token_ids=[], finish_reason="error", error=reason, is_refusal=True)
