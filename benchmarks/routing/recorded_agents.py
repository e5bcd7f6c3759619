"""The recorded sessions of agents in closed loops, each several times with blocks of its own.

They are those of benchmarks/kv_sessions.py. Knows no engines and no routing.
"""

from argparse import Namespace

from benchmarks.kv_sessions import RECORDED_BLOCK_TOKENS, load
from benchmarks.routing.workload import Follow, SimulatedRequest, Workload, in_order

NOMINAL_ANSWER_S = 2.0
"""Taken for an answer's time where a request's own arrival is guessed."""


def recorded_agents(copies: int, *, seed: int = 0, sessions: int = 25, turns: int = 10**6) -> Workload:
    """Returns all requests of so many copies of the sessions."""
    options = Namespace(
        sessions=sessions,
        copies=copies,
        turns=turns,
        seed=seed,
        rate=1.0,
        speed=1.0,
        shorter=1,
        tokens_per_block=RECORDED_BLOCK_TOKENS,
    )
    requests: list[SimulatedRequest] = []
    follows: dict[int, Follow] = {}
    dense: dict[int, int] = {}
    for session, turns_of in enumerate(load(options)):
        at_s = 0.0
        for position, turn in enumerate(turns_of):
            at_s += turn.think_s + NOMINAL_ANSWER_S * (position > 0)
            number, prompt = len(requests), len(turn.blocks) * RECORDED_BLOCK_TOKENS
            whole = (prompt + turn.output_tokens) // RECORDED_BLOCK_TOKENS
            blocks = tuple(dense.setdefault(block, len(dense)) for block in (turn.blocks + turn.answer)[:whole])
            requests.append(SimulatedRequest(number, at_s, prompt, turn.output_tokens, blocks, session))
            if position:
                follows[number] = Follow((number - 1,), turn.think_s)
    return in_order("recorded agents", RECORDED_BLOCK_TOKENS, requests, follows)
