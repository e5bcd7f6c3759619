"""How many tokens a pass guesses: from what was accepted of each sequence, and from what passes were measured to take.

Pure arithmetic on what it is told; seconds come from outside. It knows neither sequences nor devices.
"""

from collections.abc import Callable, Sequence

from mini_infer_engine.core.speculation.acceptance import draft_levels, expected_tokens, worthwhile_drafts
from mini_infer_engine.core.speculation.batch_account import CREDIT, PROBE_AFTER, STAKE, BatchAccount
from mini_infer_engine.core.speculation.pass_times import GuessCosts, PassKind, ReadingTimes, assumed_seconds, pass_kind

_STEADY, _STEADY_KNOWN = 4, 32
"""Passes without guesses, one like the other, that are looked at together: a window of measurements.

At first, and where it is known what such passes take.
"""
_YIELD_WEIGHT = 0.02
"""Of the newest observation in the running mean."""
_LIKENESS = 0.85
"""How far costs of one size of batch are those of another, for each power of two between them."""
_PLAIN_DUE_AT_MOST = 8_192
"""Passes with guesses after which some without are measured again: 128 at first, twice as many each time.

What there is to be beaten was measured in the first passes of a batch, which may have been slow ones.
"""
_HOLD = 8
"""Passes for which a choice stands: to choose anew for each would cost the host more than it brings."""
_HOLD_TRIAL = 3
"""The same where it is not known what a pass takes: the second of them tells."""
_HOLD_PROBE, _FEW_ROWS = 3, 4
"""The same where easier texts are looked for, with more rows than a few."""
_HOLD_PLAIN, _HOLD_PLAIN_AT_MOST = 32, 256
"""The same where nothing is guessed, or as many as there are rows, or a quarter of those that have guessed nothing.

Until something is guessed, acceptances stay as they are.
"""
_PROBE_AFTER_AT_MOST = 65_536
"""Passes without guesses after which some are made all the same, or it would never be known that texts are easier now:

64 at first, twice as many after each time in vain.
"""
_EASY = 0.9
"""Acceptance of texts that are easy: where guesses would lose even with these, nothing is tried."""
_REST = 512
"""Passes without guesses after a trial that would have taken too long."""
_LEAST_GAIN = 1.02
"""Of guessing, as it is expected, for it to be done: measurements are not exact."""
_STEPS = 32
"""Acceptances are told apart by this share of one."""
_READING_MARGIN = 1.25
"""What a draft's reading may take, as a share of what is expected."""


class DraftController:
    """Chooses the number of guesses of each pass of one engine.

    Beside what it expects it keeps an account of what guessing has won and lost, in seconds of wall time: however wrong
    expectations are, it never loses more than its allowance, but for the first few passes of each size of batch.
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
        """Tokens of a pass that the choice in force should make."""
        self._passes = 0
        self._level = self._size = self._left = 0
        """The choice in force, the size of batch that it is for, and passes for which it stands."""
        self.is_trial = False
        """Whether the choice in force is to find out what it is worth."""
        self._before: PassKind | None = None
        self._steady_s, self._steady_passes = 0.0, 0
        """Of the latest passes without guesses, what nothing was made of yet."""
        self._steady_window = _STEADY
        self._reading_s = 0.0
        """What the draft's reading that is under way has taken so far."""

    # -- Choosing

    def stays_plain(self, num_rows: int, *, masked: bool = False) -> bool:
        """Whether the choice not to guess still stands: then nobody need look at the rows."""
        if self._level or self._left <= 0 or self._size != pass_kind(num_rows, 0, masked).size:
            return False
        self._left -= 1
        self._passes += 1
        return True

    @property
    def plain_passes_left(self) -> int:
        """For how many passes of this kind the choice not to guess stands."""
        return 0 if self._level else max(0, self._left)

    def rested(self, passes: int) -> None:
        """So many passes went by without being asked about, since that choice stood, and now comes another kind."""
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
        """Guesses for a pass over sequences of these acceptances; 0: it is faster without.

        `num_rows`: of the whole pass, where it has sequences for which nothing is guessed. `masked`: see `PassKind`.
        `to_read`: tells how many tokens a draft has to read before it can guess.
        """
        rows = len(acceptances) if num_rows is None else num_rows
        kind = pass_kind(rows, 0, masked)
        self._passes += 1
        if self._left <= 0 or self._size != kind.size:
            known = self._known_of(kind)
            had_guesses = self._level > 0 and self._size == kind.size
            self._size = kind.size
            self._level = self._decide(kind, known, acceptances, to_read, had_guesses=had_guesses)
            self._left = self._passes_to_hold(rows, known, had_guesses=had_guesses)
        self._left -= 1
        return self._level

    def prepares(self) -> None:
        """The pass that was chosen now prepares others and guesses nothing: the choice stands for one more."""
        if self._level:
            self._left += 1

    def rest(self) -> None:
        """A trial would cost too much now: no guesses for a while."""
        self._level, self._left = 0, _REST

    def _passes_to_hold(self, rows: int, known: BatchAccount, *, had_guesses: bool) -> int:
        seconds = known.seconds(self._level, self._passes)
        if self._level and self.is_trial:
            return _HOLD_TRIAL if seconds is None else _HOLD_PROBE if rows > _FEW_ROWS else _HOLD
        if self._level:
            return _HOLD
        if had_guesses or seconds is None:
            return _HOLD
        return max(_HOLD_PLAIN, rows, min(known.num_plain // 4, _HOLD_PLAIN_AT_MOST))

    def _decide(
        self,
        kind: PassKind,
        known: BatchAccount,
        acceptances: Sequence[float],
        to_read: Callable[[], int],
        *,
        had_guesses: bool,
    ) -> int:
        self.is_trial = True
        plain_s = known.seconds(0, self._passes)
        if plain_s is None:
            return 0  # first what there is to be beaten
        if had_guesses:
            known.end_trial(self._level, self._passes)
        entry_s = self._reading.seconds(to_read())
        needed_s = known.reserve_s + (_READING_MARGIN * entry_s + STAKE * plain_s if entry_s else 0.0)
        if known.account_s < needed_s:
            return 0
        if had_guesses and known.num_guessing >= known.plain_due and known.account_s >= self._reading.mean_s:
            known.plain_due = min(2 * known.plain_due, _PLAIN_DUE_AT_MOST)
            known.num_guessing = 0
            return 0
        steps = [int(one * _STEPS) for one in acceptances]
        best, self._foreseen = self._best(kind, known, plain_s, steps)
        if best:
            self.is_trial = known.seconds(best, self._passes) is None
            if not self.is_trial:
                known.probe_after = PROBE_AFTER
        elif known.num_plain > known.probe_after and self._may_probe(kind, known, plain_s, steps, entry_s):
            known.probe_after = min(2 * known.probe_after, _PROBE_AFTER_AT_MOST)
            self._yield = {level: (1 + share) / 2 for level, share in self._yield.items()}
            best = self.levels[0]
            self._foreseen = self._foreseen_tokens(best, steps) + kind.rows - len(steps)
        if best:
            known.begin()
        return best

    def _best(self, kind: PassKind, known: BatchAccount, plain_s: float, steps: list[int]) -> tuple[int, float]:
        """The number of guesses that makes the most tokens a second, and the tokens of such a pass."""
        others = kind.rows - len(steps)
        best, best_rate, best_foreseen = 0, kind.rows / plain_s * _LEAST_GAIN, 0.0
        for level in self.levels:
            foreseen = self._foreseen_tokens(level, steps) + others
            rate = foreseen / self._seconds(kind, known, plain_s, level)
            if rate > best_rate:
                best, best_rate, best_foreseen = level, rate, foreseen
        return best, best_foreseen

    def _may_probe(self, kind: PassKind, known: BatchAccount, plain_s: float, steps: list[int], entry_s: float) -> bool:
        """Whether easier texts would make guessing worth it, and the account bears to find out that they are not."""
        easy = [int(_EASY * _STEPS)] * len(steps)
        loss_s = _HOLD * max(0.0, self._seconds(kind, known, plain_s, self.levels[0]) - plain_s)
        affordable = known.account_s >= 2 * entry_s + min(loss_s, CREDIT * plain_s)
        return affordable and self._best(kind, known, plain_s, easy)[0] > 0

    def _foreseen_tokens(self, level: int, steps: list[int]) -> float:
        expected = self._expected[level]
        return sum([expected[step] for step in steps]) * self._yield[level]

    def _seconds(self, kind: PassKind, known: BatchAccount, plain_s: float, drafts: int) -> float:
        """Measured; else between what was measured of fewer and of more guesses, or as batches of other sizes have it.

        In no case less than the device takes.
        """
        own = known.seconds(drafts, self._passes)
        if own is not None:
            return own
        measured = {
            level: seconds for level in self.levels if (seconds := known.seconds(level, self._passes)) is not None
        }
        assumed_s = assumed_seconds(drafts, {0: plain_s, **measured})
        if not measured:
            assumed_s = max(assumed_s, plain_s * self._cost_elsewhere(kind.size, drafts))
        return max(assumed_s, self._costs.least_s(kind.rows, drafts))

    def _cost_elsewhere(self, size: int, drafts: int) -> float:
        """Passes without guesses that one with them takes, judged by the nearest other size of batch; at least 1."""
        nearest, cost = 64, 1.0
        for other, known in self._sizes.items():
            guessing_s, plain_s = known.seconds(drafts, self._passes), known.seconds(0, self._passes)
            distance = abs(other // 4 - size // 4)
            if guessing_s is not None and plain_s is not None and other % 2 == size % 2 and distance < nearest:
                nearest, cost = distance, 1 + max(0.0, guessing_s / plain_s - 1) * _LIKENESS**distance
        return cost

    def _known_of(self, kind: PassKind) -> BatchAccount:
        known = self._sizes.get(kind.size)
        if known is None:
            known = self._sizes[kind.size] = BatchAccount()
        return known

    # -- Learning

    def observe(self, done: PassKind | None, launched: Sequence[PassKind | None], seconds: float, tokens: int) -> None:
        """From one commit to the next so much time has passed.

        `done`: the pass that was committed, which made so many tokens; `launched`: what was launched meanwhile, whose
        launches took a part of the time. None: other passes than of decodes alone.
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
        known = self._known_of(done)
        self._steady_window = self._steady_window_of(known)
        reads = done.read or any(one is not None and one.read for one in launched)
        if reads:
            self._observe_reading(known, done, seconds)
        if done.drafts or reads or any(one is not None and one.drafts for one in launched):
            self._charge(known, before, done, seconds, tokens, reads=bool(reads))
        known.passed(done.drafts, seconds)
        if not reads and launched and _alike(before, done) and all(_alike(one, done) for one in launched):
            known.measure(done.drafts, seconds, self._passes, reading_s=self._reading.mean_s)

    def _observe_steady(self, kind: PassKind) -> None:
        """So many passes without guesses, one like the other: told a few at a time, for they must cost nothing."""
        passes, self._steady_passes = self._steady_passes, 0
        seconds, self._steady_s = self._steady_s, 0.0
        if passes:
            known = self._known_of(kind)
            known.passed(0, seconds, passes)
            known.measure(0, seconds, self._passes, reading_s=self._reading.mean_s, passes=passes)
            self._steady_window = self._steady_window_of(known)

    def _steady_window_of(self, known: BatchAccount) -> int:
        return _STEADY if known.seconds(0, self._passes) is None else _STEADY_KNOWN

    def _observe_reading(self, known: BatchAccount, done: PassKind, seconds: float) -> None:
        """A part of the time was a draft's reading: its launch, or what the device took before this pass."""
        plain_s = known.seconds(0, self._passes)
        if plain_s is None:
            return
        usual_s = self._seconds(done, known, plain_s, done.drafts) if done.drafts else plain_s
        self._reading_s += max(0.0, seconds - usual_s)
        if done.read:
            self._reading.add(done.read, self._reading_s)
            self._reading_s = 0.0

    def _charge(
        self, known: BatchAccount, before: PassKind | None, done: PassKind, seconds: float, tokens: int, *, reads: bool
    ) -> None:
        """What this time has won or lost against passes without guesses that make as many tokens."""
        plain_s = known.seconds(0, self._passes)
        if plain_s is None:
            return
        usual_s = known.seconds(done.drafts, self._passes)
        if usual_s is not None and not reads:  # what held a pass up is not the guesses' fault; a draft's reading is
            seconds = min(seconds, 2 * max(usual_s, plain_s))
        gain_s = tokens / done.rows * plain_s - seconds
        in_a_row = _alike(before, done) and not reads
        if done.drafts and done.drafts == self._level and self._foreseen:
            share = tokens / self._foreseen * self._yield[done.drafts]
            self._yield[done.drafts] += _YIELD_WEIGHT * (min(share, 2.0) - self._yield[done.drafts])
        if known.charge(gain_s, done.rows, plain_s, in_a_row=in_a_row):
            known.give_up(done.drafts, None if done.read else seconds, plain_s, self._passes)
            if self._level and self._size == done.size:
                self._level = self._left = 0


def _alike(one: PassKind | None, other: PassKind) -> bool:
    """Whether their times are of one kind."""
    return one is not None and not one.read and one.drafts == other.drafts and one.size == other.size
