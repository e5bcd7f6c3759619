"""What is known of batches of one size: what passes take, and the account of what guessing has won and lost in them.

Seconds are of wall time. It knows neither acceptances nor how many guesses are chosen.
"""

from dataclasses import dataclass, field

from mini_infer_engine.core.speculation.pass_times import PassTimes

CREDIT = 4
"""Passes without guesses whose time it may lose ahead of the allowance: to find out what it is worth at all."""
STAKE = 2
"""The same, that guessing may lose in a row before it is given up."""
_STAKE_OF_ONE = 8
"""Added to it for a single row, and less for more of them: the luck of few changes."""
_ALLOWANCE = 0.01
"""Of all time, what guessing may lose."""
_SAVED_AT_MOST = 64
"""Passes without guesses: of allowance and gains what is kept for trials, and for what a draft must read before."""
_LEFT_FREE = 8
"""The same, of a full account, that may be used at once after guessing was given up."""
_MEASURED_FOR = 16_384
"""Passes after which a measurement counts as old, and is made again."""
_HARDLY_MEASURED_FOR = 512
"""The same, of passes that were stopped when hardly any had been made."""
_PLAIN_WINDOWS = 3
"""Of passes without guesses, before anything is held against them."""
PROBE_AFTER = 64
PLAIN_DUE = 128


@dataclass(slots=True)
class BatchAccount:
    """See the module."""

    times: dict[int, PassTimes] = field(default_factory=dict)
    """By guesses."""
    account_s: float = 0.0
    """Won by guessing against passes without it that make as many tokens, and allowed, less what was lost."""
    has_credit: bool = False
    """What may be lost ahead was put to the account."""
    reserve_s: float = 0.0
    """Of the account, what must be there before anything is guessed again."""
    slump_s: float = 0.0
    """What the latest passes with guesses have lost, a draft's reading left out; never above nothing."""
    num_plain: int = 0
    """Passes since anything was guessed."""
    probe_after: int = PROBE_AFTER
    """Passes without guesses after which some are made all the same."""
    num_guessing: int = 0
    """Passes with guesses since some without were measured."""
    plain_due: int = PLAIN_DUE
    """Passes with guesses after which some without are measured again."""

    def seconds(self, drafts: int, now: int) -> float | None:
        """Of a pass with so many guesses, where that was measured and is not old. `now` counts passes."""
        times = self.times.get(drafts)
        if times is None or len(times.windows) < (1 if drafts else _PLAIN_WINDOWS):
            return None
        age = now - times.measured_at
        return times.seconds if age <= (_MEASURED_FOR if len(times.windows) > 1 else _HARDLY_MEASURED_FOR) else None

    def passed(self, drafts: int, seconds: float, passes: int = 1) -> None:
        """So many passes of one kind, which took so long together."""
        self.account_s += _ALLOWANCE * seconds
        if drafts:
            self.num_plain = 0
            self.num_guessing += passes
        else:
            self.num_plain += passes

    def measure(self, drafts: int, seconds: float, now: int, *, reading_s: float, passes: int = 1) -> None:
        """All of this time is that of passes with so many guesses. `reading_s`: of a draft's usual reading."""
        times = self.times.get(drafts)
        if times is None:
            times = self.times[drafts] = PassTimes()
        times.add(seconds, now, passes)
        plain_s = self.seconds(0, now)
        if plain_s is None:
            return
        if not self.has_credit:
            self.account_s, self.has_credit = self.account_s + CREDIT * plain_s, True
        self.account_s = min(self.account_s, _SAVED_AT_MOST * plain_s + 2 * reading_s)

    def end_trial(self, drafts: int, now: int) -> None:
        """What was measured so far of passes with so many guesses must do."""
        if self.seconds(drafts, now) is None:
            self.times.setdefault(drafts, PassTimes()).close(now)

    def begin(self) -> None:
        """Something is guessed from now on."""
        self.reserve_s = self.slump_s = 0.0

    def charge(self, gain_s: float, rows: int, plain_s: float, *, in_a_row: bool) -> bool:
        """Guessing has won or lost so much with so many rows. True: it is to be given up."""
        self.account_s += gain_s
        if in_a_row:
            self.slump_s = min(0.0, self.slump_s + gain_s)
        return self.account_s < 0 or self.slump_s < -(STAKE + _STAKE_OF_ONE / rows) * plain_s

    def give_up(self, drafts: int, seconds: float | None, plain_s: float, now: int) -> None:
        """No more is to be lost now. `seconds`: of the last pass, which must do where no other was measured."""
        self.reserve_s = min(max(0.0, self.account_s) + CREDIT * plain_s, (_SAVED_AT_MOST - _LEFT_FREE) * plain_s)
        self.slump_s = 0.0
        if drafts:
            times = self.times.setdefault(drafts, PassTimes())
            times.close(now)
            if not times.windows and seconds is not None:
                times.add(seconds, now)
                times.close(now)
