"""Agents in closed loops: each sends its next request when the answer has come and its tools have run.

Jobs arrive in bursts and begin with one of some shared roots (a system prompt with tools). A job is a loop of turns
with a growing prompt; some turns fan out to several at once, which are joined before the loop goes on; some jobs are
one turn. Knows no engines and no routing.
"""

from random import Random

from benchmarks.routing.workload import Blocks, Follow, SimulatedRequest, Workload, in_order

BLOCK_TOKENS = 128
ROOTS, TURNS = 16, 12
ONE_SHOT, FAN_OUT = 0.2, 0.06
FEWEST_AT_ONCE, MOST_AT_ONCE = 3, 8
NOMINAL_ANSWER_S = 4.0
"""Taken for an answer's time where a request's own arrival is guessed."""


class _Job:
    """One agent's requests."""

    def __init__(self, session: int, start_s: float, dice: Random, blocks: Blocks, first: int) -> None:
        self.session, self._dice, self._blocks, self._next = session, dice, blocks, first
        self.at_s = start_s
        self.requests: list[SimulatedRequest] = []
        self.follows: dict[int, Follow] = {}

    def turn(
        self, context: tuple[int, tuple[int, ...]], after: tuple[int, ...], pause_s: float
    ) -> tuple[int, tuple[int, tuple[int, ...]]]:
        """Adds a request that sees `context` and something new; returns its number and what the next one sees."""
        tokens = context[0]
        new = min(6000, max(40, int(self._dice.lognormvariate(6.2, 1.0))))
        output = min(1200, max(8, int(self._dice.lognormvariate(4.9, 0.7))))
        grown = self._blocks.grow(context, new + output)
        number, self._next = self._next, self._next + 1
        self.requests.append(SimulatedRequest(number, self.at_s, tokens + new, output, grown[1], self.session))
        if after:
            self.follows[number] = Follow(after, pause_s)
        return number, grown

    def loop(self, context: tuple[int, tuple[int, ...]], turns: int) -> None:
        """Adds turns that follow each other, some of them several at once."""
        after: tuple[int, ...] = ()
        for _ in range(turns):
            pause_s = self._dice.expovariate(1 / 2.0)
            if after and self._dice.random() < FAN_OUT:
                count = self._dice.randint(FEWEST_AT_ONCE, MOST_AT_ONCE)
                after = tuple(self.turn(context, after, pause_s)[0] for _ in range(count))
                self.at_s += NOMINAL_ANSWER_S
                pause_s = 0.1
            number, context = self.turn(context, after, pause_s)
            after = (number,)
            self.at_s += pause_s + NOMINAL_ANSWER_S


def agents(count: int, *, seed: int = 3) -> Workload:
    """Returns about `count` requests of agents."""
    dice = Random(seed)
    blocks = Blocks(BLOCK_TOKENS)
    roots = [blocks.grow((), dice.randint(1500, 9000)) for _ in range(ROOTS)]
    requests: list[SimulatedRequest] = []
    follows: dict[int, Follow] = {}
    start_s, session = 0.0, 0
    while len(requests) < count:
        start_s += dice.expovariate(1 / 6.0)
        for _ in range(1 + int(dice.expovariate(1 / 3.0))):  # a burst
            turns = 1 if dice.random() < ONE_SHOT else max(2, round(dice.gauss(TURNS, 4)))
            job = _Job(session, start_s, dice, blocks, len(requests))
            job.loop(roots[min(int(dice.expovariate(0.25)), ROOTS - 1)], turns)
            requests += job.requests
            follows |= job.follows
            session += 1
            start_s += 0.01
    return in_order("agents", BLOCK_TOKENS, requests, follows)
