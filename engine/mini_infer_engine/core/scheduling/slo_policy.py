"""Schedules by latency targets: the least slack first, chunks that keep token intervals, refusal of what would be late.

A prompt's place is its latest start: the time by which its first token is due less the measured time to compute it. All
slacks shrink by the same second in a second, so the place never changes and the queues stay sorted (ADR 55). All
decisions follow from a `PassTimeModel` and the sequences; the policy itself remembers only what it has measured.
"""

from collections import deque
from collections.abc import Sequence as Items
from math import ceil, inf

from mini_infer_engine.core.pass_plan import PassPlan
from mini_infer_engine.core.request import LatencyTargets
from mini_infer_engine.core.scheduling.pass_time_model import PassTimeModel
from mini_infer_engine.core.scheduling.policy import NO_LIMITS, PassLimits, Pending
from mini_infer_engine.core.scheduling.queue_forecast import Capacity, excess_s
from mini_infer_engine.core.sequence import Order, Sequence
from mini_infer_engine.core.step import Refusal, Step

BEST_EFFORT_TTFT_S = 60.0
"""Time to first token by which requests without a target are ordered, so that others do not starve them."""
INTERVAL_MARGIN = 0.85
"""Share of the strictest token interval that a pass may take: passes of one kind differ by some percent, and a client
measures the way to it as well.
"""
FIRST_TOKEN_MARGIN = 0.95
"""Share of a time to first token, or of a deadline, in which it is planned: the rest is for the way to the client."""
DECODE_SHARE = 0.6
"""Share of that interval that decode rows alone may take, before no more sequences start: prompts need the rest."""
LEAST_PREFILL_TOKENS = 16
"""Prompt tokens of a pass that is too slow already: running prefills hold pages and slots, and must end some time."""
WAIT_MARGIN = 1.1
"""Factor of predicted waits when a request is admitted."""
_ENDS = 32
"""Ends of sequences over which their rate is measured."""
_LEAST_ENDS = 4
_NEWER_SHARE = 0.1
"""Share of each finished sequence, and of each pass, in running means."""


class SLOPolicy:
    """The policy of one engine with `--scheduling-policy slo`."""

    has_targets = True

    def __init__(self, *, token_budget: int, max_num_seqs: int, chunk_alignment: int = 1) -> None:
        self.pass_times = PassTimeModel()
        self._token_budget = token_budget
        self._max_num_seqs = max_num_seqs
        self._least_prefill_tokens = max(LEAST_PREFILL_TOKENS, chunk_alignment)
        self._ends_s: deque[float] = deque(maxlen=_ENDS)
        self._output_tokens = 0.0
        """Mean output of finished sequences; 0 before the first."""
        self._committed_s = 0.0
        """Time of the last finished pass."""
        self._interval_s = 0.0
        """Mean time of passes with decode rows."""

    def order(self, sequence: Sequence, num_tokens: int) -> Order:
        """Returns priority, latest start and arrival."""
        due_s = self._first_token_due_s(sequence)
        if due_s == inf:
            due_s = sequence.arrival_s + BEST_EFFORT_TTFT_S
        return (sequence.order[0], due_s - num_tokens * self.pass_times.token_s, sequence.order[-1])

    def pending(self, sequence: Sequence, num_tokens: int, *, is_running: bool) -> Pending:
        """Returns a sequence as an entry of the forecast."""
        return Pending(sequence.order, num_tokens, self._first_token_due_s(sequence), is_running)

    def is_late(self, sequence: Sequence, num_tokens: int, now_s: float) -> bool:
        """True if a waiting sequence would miss its target even if it started now, and may still be refused."""
        return _may_be_refused(sequence) and now_s + num_tokens * self.pass_times.token_s > self._first_token_due_s(
            sequence
        )

    def admission(
        self, new: Sequence, num_tokens: int, pending: Items[Pending], running: Items[Sequence], now_s: float
    ) -> Refusal | None:
        """Refuses a sequence that would miss a target, or make one miss its own that is met without it.

        A sequence that has begun, here or at another engine, is never refused.
        """
        if not _may_be_refused(new) or not self.pass_times.is_measured:
            return None
        if (interval := self._interval_refusal(new)) is not None:
            return interval
        entry = self.pending(new, num_tokens, is_running=False)
        late_s = excess_s(entry, pending, self._capacity(running, now_s), now_s, WAIT_MARGIN)
        return _refusal(new.targets, late_s) if late_s > 0 else None

    def limits(self, plan: PassPlan, running: Items[Sequence], waiting: Items[Sequence]) -> PassLimits:
        """Returns limits with which the pass takes no longer than the strictest interval of the streams in it."""
        if not self.pass_times.is_measured or not (plan.prefills or waiting):
            return NO_LIMITS
        num_decodes = plan.step.batch.num_decodes
        interval_s = self._strictest_interval_s([*running, *waiting[:1]])
        if interval_s == inf:
            return NO_LIMITS
        streams_s = self._strictest_interval_s(plan.step.sequences[:num_decodes])
        prefill_tokens, max_running = self._prefill_tokens(num_decodes, streams_s), self._max_running(interval_s)
        if waiting and self._committed_s > waiting[0].order[1] and waiting[0].targets.itl_ms is None:
            # Its latest start is over, and it is still there: no stream's interval keeps it waiting any longer.
            max_running = max(max_running, len(running) + 1)
        return PassLimits(prefill_tokens, max_running)

    def victim(self, candidates: Items[Sequence], now_s: float) -> Sequence:
        """Returns the sequence of the lowest priority with the most slack, the last of equal ones."""
        return max(candidates, key=lambda sequence: (sequence.order[0], self.slack_s(sequence, now_s), sequence.order))

    def slack_s(self, sequence: Sequence, now_s: float) -> float:
        """Returns the seconds for which a running sequence could be delayed without missing a target."""
        if len(sequence.token_ids) <= sequence.num_prompt:
            left = max(0, sequence.num_prefill - sequence.num_computed)
            return self._first_token_due_s(sequence) - left * self.pass_times.token_s - now_s
        slacks_s = [inf]
        targets = sequence.targets
        if targets.itl_ms is not None:
            slacks_s.append(targets.itl_ms / 1000)
        if targets.deadline_ms is not None:
            made = len(sequence.token_ids) - sequence.num_prompt
            left_s = max(0.0, self._expected_output_tokens(sequence) - made) * self._interval_s
            slacks_s.append(sequence.due_s(targets.deadline_ms) - left_s - now_s)
        return min(slacks_s)

    def committed(self, step: Step, seconds: float, now_s: float) -> None:
        """Learns from the time of a finished pass."""
        num_decodes, self._committed_s = step.batch.num_decodes, now_s
        if step.batch.num_drafts or seconds <= 0 or step.loading_layerwise:
            return
        self.pass_times.observe(num_decodes, sum(row.count for row in step.batch.rows[num_decodes:]), seconds)
        if num_decodes:
            self._interval_s += (seconds - self._interval_s) * (_NEWER_SHARE if self._interval_s else 1.0)

    def finished(self, sequence: Sequence) -> None:
        """Learns from the end of a sequence how long outputs are, and how often slots come free."""
        made = len(sequence.token_ids) - sequence.num_prompt
        self._ends_s.append(self._committed_s)
        self._output_tokens += (made - self._output_tokens) * (_NEWER_SHARE if self._output_tokens else 1.0)

    def _first_token_due_s(self, sequence: Sequence) -> float:
        """Returns the time by which the first token must come for the targets; infinite if there are none."""
        due_s = _planned_by_s(sequence, sequence.targets.ttft_ms)
        if sequence.targets.deadline_ms is not None:
            output_s = self._expected_output_tokens(sequence) * self._interval_s
            due_s = min(due_s, _planned_by_s(sequence, sequence.targets.deadline_ms) - output_s)
        return due_s

    def _expected_output_tokens(self, sequence: Sequence) -> float:
        most = sequence.last_position + 2 - sequence.num_prompt
        return min(most, self._output_tokens) if self._output_tokens else most

    def _interval_refusal(self, new: Sequence) -> Refusal | None:
        """Refuses a token interval that a pass with nothing else exceeds already."""
        itl_ms, alone_ms = new.targets.itl_ms, 1000 * self.pass_times.decode_s(1)
        if itl_ms is None or alone_ms <= itl_ms:
            return None
        reason = f"a token takes {alone_ms:.1f} ms here, and itl_ms is {itl_ms:g}: allow more time between tokens"
        return Refusal(reason, BEST_EFFORT_TTFT_S)

    def _strictest_interval_s(self, sequences: Items[Sequence]) -> float:
        """Returns the strictest interval that can be met at all. One that was admitted before times were measured, or
        that may not be refused, limits no others for nothing.
        """
        alone_ms = 1000 * self.pass_times.decode_s(1)
        stated = [itl_ms for one in sequences if (itl_ms := one.targets.itl_ms) is not None and itl_ms >= alone_ms]
        return min(stated) / 1000 if stated else inf

    def _prefill_tokens(self, num_decodes: int, interval_s: float) -> int:
        """Returns the prompt tokens with which a pass keeps an interval, as many as the budget allows without one."""
        if interval_s == inf:
            return self._token_budget
        tokens = self.pass_times.prefill_tokens_within(num_decodes, INTERVAL_MARGIN * interval_s)
        return int(max(self._least_prefill_tokens, min(tokens, self._token_budget)))

    def _max_running(self, interval_s: float) -> int:
        return max(1, self.pass_times.decodes_within(DECODE_SHARE * interval_s, self._max_num_seqs))

    def _capacity(self, running: Items[Sequence], now_s: float) -> Capacity:
        """Returns the engine's speed beside the sequences that run now."""
        streams = [sequence for sequence in running if sequence.num_computed >= sequence.num_prefill]
        interval_s = self._strictest_interval_s(streams)
        tokens = self._prefill_tokens(len(streams), interval_s)
        pass_s = self.pass_times.decode_s(len(streams)) + tokens * self.pass_times.token_s
        strictest_s = self._strictest_interval_s(running)
        max_running = self._max_num_seqs if strictest_s == inf else self._max_running(strictest_s)
        ends_per_s = 0.0
        if len(self._ends_s) >= _LEAST_ENDS:
            ends_per_s = len(self._ends_s) / max(1e-3, now_s - self._ends_s[0])
        return Capacity(tokens / max(pass_s, 1e-9), max(0, max_running - len(running)), ends_per_s)


def _planned_by_s(sequence: Sequence, target_ms: float | None) -> float:
    """Returns the time by which what a target asks for is planned; infinite if there is no target."""
    return sequence.due_s(None if target_ms is None else FIRST_TOKEN_MARGIN * target_ms)


def _may_be_refused(sequence: Sequence) -> bool:
    """True if a sequence has neither begun, here or at another engine, nor is computed elsewhere."""
    has_begun = sequence.num_cached is not None or len(sequence.token_ids) > sequence.num_prompt
    return not has_begun and sequence.kv_source is None


def _refusal(targets: LatencyTargets, late_s: float) -> Refusal:
    """Returns the refusal of a request whose own target, or another's because of it, would be missed by `late_s`."""
    stated = {"ttft_ms": targets.ttft_ms, "deadline_ms": targets.deadline_ms}
    shown = " and ".join(f"{name} = {value:g}" for name, value in stated.items() if value is not None)
    expected = f"{shown} would be missed" if shown else "the latency targets of other requests would be missed"
    seconds = max(1, ceil(late_s))
    return Refusal(f"{expected} by about {late_s:.1f} s at the present load: try again in about {seconds} s", late_s)
