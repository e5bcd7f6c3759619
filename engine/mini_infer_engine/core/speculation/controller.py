"""Chooses how many tokens a pass drafts, by each sequence's acceptance and the measured times of passes.

Pure arithmetic on its inputs; seconds come from outside. It knows neither sequences nor devices.
"""

from collections.abc import Callable, Sequence

from mini_infer_engine.core.speculation.acceptance import draft_levels, expected_tokens, worthwhile_drafts
from mini_infer_engine.core.speculation.batch_account import CREDIT, PROBE_AFTER, STAKE, BatchAccount
from mini_infer_engine.core.speculation.pass_times import GuessCosts, PassKind, ReadingTimes, assumed_seconds, pass_kind

_STEADY, _STEADY_MEASURED = 4, 32
"""Length of a window of measurements over uniform passes without drafts.

The first is used while the time of such passes is unknown, the second once it is known.
"""
_YIELD_WEIGHT = 0.02
"""Weight of the newest observation in the running mean of `_yield`."""
_LIKENESS = 0.85
"""Share of the extra cost of drafts that is assumed for another batch size, for each power of two between the two
sizes.
"""
_PLAIN_DUE_AT_MOST = 8_192
"""Most passes with drafts after which some without are measured again: 128 at first, twice as many each time.

The baseline was measured in the first passes of a batch, which may have been slow ones.
"""
_HOLD = 8
"""Passes for which a choice stands: choosing anew for each would cost the host more than it gains."""
_HOLD_TRIAL = 3
"""Passes for which a choice stands if their time is unknown: the second of them measures it."""
_HOLD_PROBE, _FEW_ROWS = 3, 4
"""Passes for which a choice stands while it probes for easier texts, with more than a few rows."""
_HOLD_PLAIN, _HOLD_PLAIN_AT_MOST = 32, 256
"""Passes for which the choice not to draft stands, at least. It is the number of rows, or a quarter of the passes since
the last draft (up to the second value), if that is more.

Until something is drafted, acceptances stay as they are.
"""
_PROBE_AFTER_AT_MOST = 65_536
"""Most passes without drafts after which some with drafts are tried all the same, or easier texts would never be
noticed.

The number is 64 at first, and doubles after each vain attempt.
"""
_EASY = 0.9
"""Acceptance of easy texts: if drafts would lose even with these, nothing is tried."""
_REST = 512
"""Passes without drafts after a trial that would have taken too long."""
_LEAST_GAIN = 1.02
"""Least expected gain for which tokens are drafted: measurements are not exact."""
_STEPS = 32
"""Number of steps to which acceptances are rounded."""
_READING_MARGIN = 1.25
"""Time that is reserved for a draft's reading, as a share of its expected time."""


class DraftController:
    """Chooses the number of draft tokens in each pass of one engine.

    In addition to its expectations it keeps an account of what speculation has won and lost, in seconds of wall time:
    however wrong expectations are, it never loses more than its allowance, except in the first few passes of each batch
    size.
    """

    def __init__(self, most: int, costs: GuessCosts | None = None) -> None:
        self.levels = draft_levels(most)
        steps = [step / _STEPS for step in range(_STEPS + 1)]
        self._expected = {
            level: [expected_tokens(step, worthwhile_drafts(step, level)) for step in steps] for level in self.levels
        }
        self._costs = costs or GuessCosts()
        self._reading = ReadingTimes()
        for tokens, seconds in self._costs.reading:
            self._reading.add(tokens, seconds)
        self._sizes: dict[int, BatchAccount] = {}
        self._yield = dict.fromkeys(self.levels, 1.0)
        """Tokens that passes have made, as a share of those that were expected."""
        self._foreseen = 0.0
        """Tokens of a pass that the current choice should make."""
        self._passes = 0
        self._level = self._size = self._left = 0
        """The current choice, its batch size, and the passes for which it still stands."""
        self.is_trial = False
        """True if the current choice is a trial, made to measure its benefit."""
        self._before: PassKind | None = None
        self._steady_s, self._steady_passes = 0.0, 0
        """Seconds and number of the latest passes without drafts that are not recorded yet."""
        self._steady_window = _STEADY
        self._reading_s = 0.0
        """Seconds that the draft's current reading has taken so far."""

    # -- Choosing

    def stays_plain(self, num_rows: int, *, masked: bool = False) -> bool:
        """Returns True if the choice not to draft still stands, so that the rows need not be examined."""
        if self._level or self._left <= 0 or self._size != pass_kind(num_rows, 0, masked).size:
            return False
        self._left -= 1
        self._passes += 1
        return True

    @property
    def plain_passes_left(self) -> int:
        """Number of passes of this kind for which the choice not to draft stands."""
        return 0 if self._level else max(0, self._left)

    def rested(self, passes: int) -> None:
        """Records passes that relied on the current choice without asking, before a pass of another kind."""
        self._left = min(self._left - passes, _HOLD_PLAIN)
        self._passes += passes

    def choose(
        self,
        acceptances: Sequence[float],
        num_rows: int | None = None,
        *,
        masked: bool = False,
        to_read: Callable[[], int] = lambda: 0,
    ) -> int:
        """Returns the number of draft tokens for a pass over sequences of these acceptances; 0 if it is faster without.

        `num_rows` is that of the whole pass, if it has sequences that do not speculate. `masked`: some rows have
        grammars. `to_read` returns how many tokens a draft has to read before it can draft.
        """
        rows = len(acceptances) if num_rows is None else num_rows
        kind = pass_kind(rows, 0, masked)
        self._passes += 1
        if self._left <= 0 or self._size != kind.size:
            account = self._account_of(kind)
            had_guesses = self._level > 0 and self._size == kind.size
            self._size = kind.size
            self._level = self._decide(kind, account, acceptances, to_read, had_guesses=had_guesses)
            self._left = self._passes_to_hold(rows, account, had_guesses=had_guesses)
        self._left -= 1
        return self._level

    def prepares(self) -> None:
        """Extends the current choice by one pass: the chosen pass prepares others and drafts nothing."""
        if self._level:
            self._left += 1

    def rest(self) -> None:
        """Stops drafting for a while, because a trial would cost too much now."""
        self._level, self._left = 0, _REST

    def _passes_to_hold(self, rows: int, account: BatchAccount, *, had_guesses: bool) -> int:
        seconds = account.seconds(self._level, self._passes)
        if self._level and self.is_trial:
            return _HOLD_TRIAL if seconds is None else _HOLD_PROBE if rows > _FEW_ROWS else _HOLD
        if self._level:
            return _HOLD
        if had_guesses or seconds is None:
            return _HOLD
        return max(_HOLD_PLAIN, rows, min(account.num_plain // 4, _HOLD_PLAIN_AT_MOST))

    def _decide(
        self,
        kind: PassKind,
        account: BatchAccount,
        acceptances: Sequence[float],
        to_read: Callable[[], int],
        *,
        had_guesses: bool,
    ) -> int:
        self.is_trial = True
        plain_s = account.seconds(0, self._passes)
        if plain_s is None:
            return 0  # first what there is to be beaten
        if had_guesses:
            account.end_trial(self._level, self._passes)
        entry_s = self._reading.seconds(to_read())
        needed_s = account.reserve_s + (_READING_MARGIN * entry_s + STAKE * plain_s if entry_s else 0.0)
        if account.account_s < needed_s:
            return 0
        if had_guesses and account.num_guessing >= account.plain_due and account.account_s >= self._reading.mean_s:
            account.plain_due = min(2 * account.plain_due, _PLAIN_DUE_AT_MOST)
            account.num_guessing = 0
            return 0
        steps = [int(one * _STEPS) for one in acceptances]
        best, self._foreseen = self._best(kind, account, plain_s, steps)
        if best:
            self.is_trial = account.seconds(best, self._passes) is None
            if not self.is_trial:
                account.probe_after = PROBE_AFTER
        elif account.num_plain > account.probe_after and self._may_probe(kind, account, plain_s, steps, entry_s):
            account.probe_after = min(2 * account.probe_after, _PROBE_AFTER_AT_MOST)
            self._yield = {level: (1 + share) / 2 for level, share in self._yield.items()}
            best = self.levels[0]
            self._foreseen = self._foreseen_tokens(best, steps) + kind.rows - len(steps)
        if best:
            account.begin()
        return best

    def _best(self, kind: PassKind, account: BatchAccount, plain_s: float, steps: list[int]) -> tuple[int, float]:
        """Returns the number of draft tokens that makes the most tokens a second, and the tokens of such a pass."""
        others = kind.rows - len(steps)
        best, best_rate, best_foreseen = 0, kind.rows / plain_s * _LEAST_GAIN, 0.0
        for level in self.levels:
            foreseen = self._foreseen_tokens(level, steps) + others
            rate = foreseen / self._seconds(kind, account, plain_s, level)
            if rate > best_rate:
                best, best_rate, best_foreseen = level, rate, foreseen
        return best, best_foreseen

    def _may_probe(
        self, kind: PassKind, account: BatchAccount, plain_s: float, steps: list[int], entry_s: float
    ) -> bool:
        """Returns True if drafts would pay off for easier texts, and the account can afford to find out that they do
        not.
        """
        easy = [int(_EASY * _STEPS)] * len(steps)
        loss_s = _HOLD * max(0.0, self._seconds(kind, account, plain_s, self.levels[0]) - plain_s)
        affordable = account.account_s >= 2 * entry_s + min(loss_s, CREDIT * plain_s)
        return affordable and self._best(kind, account, plain_s, easy)[0] > 0

    def _foreseen_tokens(self, level: int, steps: list[int]) -> float:
        expected = self._expected[level]
        return sum([expected[step] for step in steps]) * self._yield[level]

    def _seconds(self, kind: PassKind, account: BatchAccount, plain_s: float, drafts: int) -> float:
        """Returns the time of a pass: measured, or estimated from fewer and more drafts, or from batches of other
        sizes.

        It is never less than the device takes.
        """
        own = account.seconds(drafts, self._passes)
        if own is not None:
            return own
        measured = {
            level: seconds for level in self.levels if (seconds := account.seconds(level, self._passes)) is not None
        }
        assumed_s = assumed_seconds(drafts, {0: plain_s, **measured})
        if not measured:
            assumed_s = max(assumed_s, plain_s * self._cost_elsewhere(kind.size, drafts))
        return max(assumed_s, self._costs.least_s(kind.rows, drafts))

    def _cost_elsewhere(self, size: int, drafts: int) -> float:
        """Returns the cost of a pass with drafts in passes without, by the nearest other size of batch; at least 1."""
        nearest, cost = 64, 1.0
        for other, account in self._sizes.items():
            guessing_s, plain_s = account.seconds(drafts, self._passes), account.seconds(0, self._passes)
            distance = abs(other // 4 - size // 4)
            if guessing_s is not None and plain_s is not None and other % 2 == size % 2 and distance < nearest:
                nearest, cost = distance, 1 + max(0.0, guessing_s / plain_s - 1) * _LIKENESS**distance
        return cost

    def _account_of(self, kind: PassKind) -> BatchAccount:
        account = self._sizes.get(kind.size)
        if account is None:
            account = self._sizes[kind.size] = BatchAccount()
        return account

    # -- Learning

    def observe(self, done: PassKind | None, launched: Sequence[PassKind | None], seconds: float, tokens: int) -> None:
        """Records the time from one commit to the next.

        `done` is the committed pass, which made so many tokens. `launched` are the passes launched meanwhile, whose
        launches took a part of the time. None stands for passes that do not consist of decodes alone.
        """
        before = self._before
        if done is before and len(launched) == 1 and launched[0] is done and done is not None and done.is_plain:
            self._steady_s += seconds
            self._steady_passes += 1
            if self._steady_passes >= self._steady_window:
                self._observe_steady(done)
            return
        if before is not None:
            self._observe_steady(before)
        self._before = done
        if done is None:
            return
        account = self._account_of(done)
        self._steady_window = self._steady_window_of(account)
        reads = done.read or any(one is not None and one.read for one in launched)
        if reads:
            self._observe_reading(account, done, seconds)
        if done.drafts or reads or any(one is not None and one.drafts for one in launched):
            self._charge(account, before, done, seconds, tokens, reads=bool(reads))
        account.passed(done.drafts, seconds)
        if not reads and launched and _alike(before, done) and all(_alike(one, done) for one in launched):
            account.measure(done.drafts, seconds, self._passes, reading_s=self._reading.mean_s)

    def _observe_steady(self, kind: PassKind) -> None:
        """Records uniform passes without drafts. They are collected and recorded a few at a time, to cost nothing."""
        passes, self._steady_passes = self._steady_passes, 0
        seconds, self._steady_s = self._steady_s, 0.0
        if passes:
            account = self._account_of(kind)
            account.passed(0, seconds, passes)
            account.measure(0, seconds, self._passes, reading_s=self._reading.mean_s, passes=passes)
            self._steady_window = self._steady_window_of(account)

    def _steady_window_of(self, account: BatchAccount) -> int:
        return _STEADY if account.seconds(0, self._passes) is None else _STEADY_MEASURED

    def _observe_reading(self, account: BatchAccount, done: PassKind, seconds: float) -> None:
        """Attributes a part of the time to a draft's reading: its launch, or what the device spent on it before this
        pass.
        """
        plain_s = account.seconds(0, self._passes)
        if plain_s is None:
            return
        usual_s = self._seconds(done, account, plain_s, done.drafts) if done.drafts else plain_s
        self._reading_s += max(0.0, seconds - usual_s)
        if done.read:
            self._reading.add(done.read, self._reading_s)
            self._reading_s = 0.0

    def _charge(
        self,
        account: BatchAccount,
        before: PassKind | None,
        done: PassKind,
        seconds: float,
        tokens: int,
        *,
        reads: bool,
    ) -> None:
        """Records what this time has won or lost against passes without drafts that make as many tokens."""
        plain_s = account.seconds(0, self._passes)
        if plain_s is None:
            return
        usual_s = account.seconds(done.drafts, self._passes)
        if usual_s is not None and not reads:  # what held a pass up is not the guesses' fault; a draft's reading is
            seconds = min(seconds, 2 * max(usual_s, plain_s))
        gain_s = tokens / done.rows * plain_s - seconds
        in_a_row = _alike(before, done) and not reads
        if done.drafts and done.drafts == self._level and self._foreseen:
            share = tokens / self._foreseen * self._yield[done.drafts]
            self._yield[done.drafts] += _YIELD_WEIGHT * (min(share, 2.0) - self._yield[done.drafts])
        if account.charge(gain_s, done.rows, plain_s, in_a_row=in_a_row):
            account.give_up(done.drafts, None if done.read else seconds, plain_s, self._passes)
            if self._level and self._size == done.size:
                self._level = self._left = 0


def _alike(one: PassKind | None, other: PassKind) -> bool:
    """Returns True if the times of the two passes are comparable."""
    return one is not None and not one.read and one.drafts == other.drafts and one.size == other.size
