"""Represents the beams of one request as sequences: each pass yields their candidates, and they advance together.

A beam with one continuation keeps its sequence; one with several is forked. The sequence of a beam without continuation
becomes such a fork, or is dropped. This module knows no passes, and of pages only `Scheduler.fork`, `move` and `drop`.
"""

from array import array

import msgspec

from mini_infer_engine.core.beam_search.search import Beam, BeamRules, BeamState, advance
from mini_infer_engine.core.request import Output, Request, SamplingParams, TokenLogprobs
from mini_infer_engine.core.scheduler import Scheduler
from mini_infer_engine.core.sequence import Sequence, SequenceGroup, State


class BeamGroup:
    """One request's beam search. Its sequence is the first beam's, and its first output is the best beam's."""

    def __init__(self, leader: Sequence, rules: BeamRules, request: Request) -> None:
        self._rules = rules
        self._request = request
        """The request as its client sent it."""
        self._state = BeamState()
        self._token_logprobs: dict[Sequence, TokenLogprobs] = {}
        """The candidates after each beam that this round has computed."""
        self._group = leader.group = SequenceGroup(rules.width, [leader])
        leader.only_known_tokens()

    def take(self, member: Sequence, token_logprobs: TokenLogprobs, scheduler: Scheduler) -> list[Output]:
        """Takes the candidates after a member from a pass. Returns outputs only once, when the search is over."""
        if member.state is not State.RUNNING:
            return []  # it was preempted, and will be computed again
        if len(self._group.members) < len(self._state.running):
            self._token_logprobs.clear()
            self._fork_others(scheduler)
        self._token_logprobs[member] = token_logprobs
        if len(self._token_logprobs) < len(self._group.members):
            return []
        self._state = advance(self._state, [self._token_logprobs[one] for one in self._group.members], self._rules)
        self._token_logprobs.clear()
        if self._state.is_over:
            return self._outputs()
        self._go_on(scheduler)
        return []

    def _fork_others(self, scheduler: Scheduler) -> None:
        """Forks the other members after a preemption: the first has been recomputed, and they share its prompt."""
        first = self._group.members[0]
        for beam in self._state.running[1:]:
            token_ids = first.token_ids[: first.num_prompt] + array("I", beam.token_ids())
            fork = scheduler.fork(first, token_ids, first.num_prompt)
            self._group.members.append(fork)

    def _go_on(self, scheduler: Scheduler) -> None:
        """Replaces the members by those of the beams that run now, in their order."""
        before, beams = self._group.members, self._state.running
        parents = {beam.parent_index for beam in beams}
        free = [member for index, member in enumerate(before) if index not in parents]
        members: list[Sequence] = []
        for beam in beams:
            parent = before[beam.parent_index]
            if beam.parent_index in parents:  # the first of its children goes on in its place
                parents.remove(beam.parent_index)
                members.append(parent)
            else:
                token_ids, num_shared = parent.token_ids + array("I", [beam.token_id]), len(parent.token_ids)
                if free:
                    members.append(scheduler.move(free.pop(), parent, token_ids, num_shared))
                else:
                    members.append(scheduler.fork(parent, token_ids, num_shared))
        for member in free:
            scheduler.drop(member)
        for beam, member in zip(beams, members, strict=True):
            if member is before[beam.parent_index]:
                scheduler.append(member, beam.token_id)
                member.only_known_tokens()
        self._group.members = members

    def _outputs(self) -> list[Output]:
        assert self._request.beam_search is not None
        request_ids, found = self._request.beam_search.request_ids, self._state.finished
        if len(found) < len(request_ids):
            error = f"n is {len(request_ids)}, and there are no more than {len(found)} texts to find: ask for so many"
            return [
                Output(request_id=request_ids[0], token_ids=[], finish_reason="error", error=error, is_refusal=True)
            ]
        return [self._output(*one) for one in zip(request_ids, found, strict=True)]

    def _output(self, request_id: str, beam: Beam) -> Output:
        sampling, is_stop = self._request.sampling, beam.token_id in self._rules.stops
        return Output(
            request_id=request_id,
            token_ids=beam.token_ids(),
            finish_reason="stop" if is_stop else "length",
            stop_reason=beam.token_id if is_stop and beam.token_id in sampling.stop_token_ids else None,
            num_cached_tokens=self._group.members[0].num_cached or 0,
            queue_time_s=self._group.members[0].queue_time_s,
            logprobs=[] if sampling.logprobs is None else beam.logprobs(sampling.logprobs),
            cumulative_logprob=beam.cumulative_logprob,
            beam_score=beam.score(self._rules.length_penalty),
        )


def request_of_beams(request: Request, rules: BeamRules) -> Request:
    """Returns the request that each beam's rows use: it asks for the most likely next tokens and ignores the sampled
    one.
    """
    client_sampling = request.sampling
    returns_all = client_sampling.logprobs == -1
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=client_sampling.max_tokens,
        logprobs=-1 if returns_all else max(rules.num_candidates, client_sampling.logprobs or 0),
        prompt_logprobs=client_sampling.prompt_logprobs,
    )
    return msgspec.structs.replace(request, sampling=sampling)


def rules_of(request: Request, stops: frozenset[int], max_tokens: int) -> BeamRules | None:
    """Returns the rules of a request's beam search, or None if it does not ask for one."""
    search = request.beam_search
    if search is None:
        return None
    return BeamRules(
        width=len(search.request_ids),
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        max_tokens=max_tokens,
        min_tokens=request.sampling.min_tokens,
        stops=stops,
    )
