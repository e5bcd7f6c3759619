"""Defines the interface of a scheduling policy, and the default one: by priority, then by arrival.

A policy reads sequences and measured times. It has no queue and no pages, and it changes no sequence.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import inf
from typing import Protocol

from mini_infer_engine.core.pass_plan import PassPlan
from mini_infer_engine.core.sequence import Order, Sequence
from mini_infer_engine.core.step import Refusal, Step

UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class PassLimits:
    """Limits of one pass beside its token budget."""

    prefill_tokens: int = UNLIMITED
    """Most tokens of its prefill chunks."""
    max_running: int = UNLIMITED
    """Sequences that run at once, above which no waiting one starts."""


NO_LIMITS = PassLimits()


@dataclass(frozen=True, slots=True)
class Pending:
    """A prompt that is not computed yet."""

    order: Order
    num_tokens: int
    """Tokens that are still to be computed."""
    due_s: float
    """Time by which its first token has to come; infinite without a target."""
    is_running: bool = False
    """True if it has a slot."""
    count: int = 1
    """Number of prompts that the entry stands for; each of them needs a slot."""


class SchedulingPolicy(Protocol):
    """The decisions of a scheduler that depend on who requests what. Times are those of a monotonic clock."""

    has_targets: bool
    """True if the policy knows latency targets. Otherwise only `victim` and `committed` are called."""

    def order(self, sequence: Sequence, num_tokens: int) -> Order:
        """Returns the place of a new sequence in both queues: the lowest is first. `num_tokens` are to be computed.

        The first part is its priority. The place stays the same until the sequence ends, and no other has it.
        """

    def pending(self, sequence: Sequence, num_tokens: int, *, is_running: bool) -> Pending:
        """Returns the entry of a sequence, of which `num_tokens` are to be computed, for `admission` of another one."""

    def admission(
        self, new: Sequence, num_tokens: int, pending: Items[Pending], running: Items[Sequence], now_s: float
    ) -> Refusal | None:
        """Returns the reason why a sequence, whose `order` is set, is refused; None if it may wait.

        `pending` are all other prompts that are not computed yet, by order.
        """

    def is_late(self, sequence: Sequence, num_tokens: int, now_s: float) -> bool:
        """True if a waiting sequence would miss its target even if it started now."""

    def limits(self, plan: PassPlan, running: Items[Sequence], waiting: Items[Sequence]) -> PassLimits:
        """Returns the limits of a pass whose decode rows are planned."""

    def victim(self, candidates: Items[Sequence], now_s: float) -> Sequence:
        """Returns the sequence that is preempted: one of `candidates`, which are running, by order."""

    def committed(self, step: Step, seconds: float, now_s: float) -> None:
        """Records a finished pass, and how long it took."""

    def finished(self, sequence: Sequence) -> None:
        """Records that a sequence has ended."""


class PriorityPolicy:
    """Runs requests of lower `priority` first, and equal ones in order of arrival. It refuses nothing."""

    has_targets = False

    def order(self, sequence: Sequence, num_tokens: int) -> Order:
        """Returns the order that the engine gave it: priority, then arrival."""
        del num_tokens
        return sequence.order

    def pending(self, sequence: Sequence, num_tokens: int, *, is_running: bool) -> Pending:
        """Returns an entry without a due time."""
        return Pending(sequence.order, num_tokens, inf, is_running)

    def admission(
        self, new: Sequence, num_tokens: int, pending: Items[Pending], running: Items[Sequence], now_s: float
    ) -> Refusal | None:
        """Returns None."""
        del new, num_tokens, pending, running, now_s
        return None

    def is_late(self, sequence: Sequence, num_tokens: int, now_s: float) -> bool:
        """Returns False."""
        del sequence, num_tokens, now_s
        return False

    def limits(self, plan: PassPlan, running: Items[Sequence], waiting: Items[Sequence]) -> PassLimits:
        """Returns no limits."""
        del plan, running, waiting
        return NO_LIMITS

    def victim(self, candidates: Items[Sequence], now_s: float) -> Sequence:
        """Returns the last in order."""
        del now_s
        return candidates[-1]

    def committed(self, step: Step, seconds: float, now_s: float) -> None:
        """Records nothing."""

    def finished(self, sequence: Sequence) -> None:
        """Records nothing."""
