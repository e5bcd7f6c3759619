"""Keeps the records of batches of one size: times of their passes, and what speculation has won and lost in them.

Seconds are of wall time. It knows neither acceptances nor how many tokens are drafted.
"""

from dataclasses import dataclass, field

from mini_infer_engine.core.speculation.pass_times import PassTimes

CREDIT = 4
"""Time that speculation may lose ahead of its allowance, to find out what it is worth, in passes without drafts."""
STAKE = 2
"""Time that speculation may lose in a row before it is given up, in passes without drafts."""
_STAKE_OF_ONE = 8
"""Added to `STAKE` for a single row, and divided by their number for more: a few rows depend on luck."""
_ALLOWANCE = 0.01
"""Share of all time that speculation may lose."""
_SAVED_AT_MOST = 64
"""Limit of the account, in passes without drafts: allowance and gains are saved for trials and for a draft's reading.
"""
_LEFT_FREE = 8
"""Part of a full account that may be used at once after speculation was given up, in passes without drafts."""
_MEASURED_FOR = 16_384
"""Passes after which a measurement counts as old, and is repeated."""
_HARDLY_MEASURED_FOR = 512
"""Passes after which a measurement of at most one window counts as old, as of passes that were stopped early."""
_PLAIN_WINDOWS = 3
"""Windows of passes without drafts that are measured before passes with drafts are compared with them."""
PROBE_AFTER = 64
PLAIN_DUE = 128


@dataclass(slots=True)
class BatchAccount:
    """The measured pass times of batches of one size, and the account of speculation in them."""

    times: dict[int, PassTimes] = field(default_factory=dict)
    """Pass times by number of draft tokens."""
    account_s: float = 0.0
    """Balance in seconds: gains against passes without drafts that make as many tokens, plus the allowance, less
    losses.
    """
    has_credit: bool = False
    """True once the credit, which may be lost in advance, was added to the account."""
    reserve_s: float = 0.0
    """Balance that must be left before anything is drafted again."""
    slump_s: float = 0.0
    """Loss of the latest passes with drafts, without the draft's reading; never positive."""
    num_plain: int = 0
    """Passes since anything was drafted."""
    probe_after: int = PROBE_AFTER
    """Passes without drafts after which some with drafts are tried all the same."""
    num_guessing: int = 0
    """Passes with drafts since some without were measured."""
    plain_due: int = PLAIN_DUE
    """Passes with drafts after which some without are measured again."""

    def seconds(self, drafts: int, now: int) -> float | None:
        """Returns the seconds of a pass with so many draft tokens. None: not measured lately. `now` counts passes."""
        times = self.times.get(drafts)
        if times is None or len(times.windows) < (1 if drafts else _PLAIN_WINDOWS):
            return None
        age = now - times.measured_at
        return times.seconds if age <= (_MEASURED_FOR if len(times.windows) > 1 else _HARDLY_MEASURED_FOR) else None

    def passed(self, drafts: int, seconds: float, passes: int = 1) -> None:
        """Records passes of one kind, which took so long together."""
        self.account_s += _ALLOWANCE * seconds
        if drafts:
            self.num_plain = 0
            self.num_guessing += passes
        else:
            self.num_plain += passes

    def measure(self, drafts: int, seconds: float, now: int, *, reading_s: float, passes: int = 1) -> None:
        """Records time that belongs to passes with so many draft tokens alone. `reading_s` is a draft's usual reading
        time.
        """
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
        """Ends a trial: what was measured of passes with so many draft tokens is used from now on."""
        if self.seconds(drafts, now) is None:
            self.times.setdefault(drafts, PassTimes()).close(now)

    def begin(self) -> None:
        """Records that speculation begins."""
        self.reserve_s = self.slump_s = 0.0

    def charge(self, gain_s: float, rows: int, plain_s: float, *, in_a_row: bool) -> bool:
        """Records what speculation has won or lost with so many rows. Returns True if it is to be given up."""
        self.account_s += gain_s
        if in_a_row:
            self.slump_s = min(0.0, self.slump_s + gain_s)
        return self.account_s < 0 or self.slump_s < -(STAKE + _STAKE_OF_ONE / rows) * plain_s

    def give_up(self, drafts: int, seconds: float | None, plain_s: float, now: int) -> None:
        """Stops losses for now. `seconds` is the last pass's time, which is used if no other was measured."""
        self.reserve_s = min(max(0.0, self.account_s) + CREDIT * plain_s, (_SAVED_AT_MOST - _LEFT_FREE) * plain_s)
        self.slump_s = 0.0
        if drafts:
            times = self.times.setdefault(drafts, PassTimes())
            times.close(now)
            if not times.windows and seconds is not None:
                times.add(seconds, now)
                times.close(now)
