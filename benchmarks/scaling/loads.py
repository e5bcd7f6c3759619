"""Recorded requests of an hour as loads, and the same requests in bursts. Knows no engines."""

import csv
import json
import lzma
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import groupby
from pathlib import Path
from random import Random

from benchmarks.routing.workload import Blocks, SimulatedRequest, find_mooncake, mooncake

BLOCK_TOKENS = 512
"""As in the Mooncake trace; blocks of the others are counted in these too."""
HOUR_S = 3600.0
PERIOD_S, BURST_S, BURST_SHARE = 600.0, 100.0, 0.5
"""In each period, this share of its requests arrives within one burst of this length."""
AGENT_BLOCK_TOKENS = 64


def azure(folder: Path) -> list[SimulatedRequest]:
    """Returns the conversation hour of Azure's trace of 2023. Its prompts have nothing in common."""
    with lzma.open(folder / "azure_conversation_2023.csv.xz", "rt") as lines:
        rows = [(_seconds(row["TIMESTAMP"]), row) for row in csv.DictReader(lines)]
    blocks, first_s = Blocks(BLOCK_TOKENS), min(at_s for at_s, _ in rows)
    return _in_order(
        SimulatedRequest(0, at_s - first_s, prompt, max(1, int(row["GeneratedTokens"])), blocks.grow((), prompt)[1])
        for at_s, row in rows
        for prompt in (max(1, int(row["ContextTokens"])),)
    )


def mooncake_hour() -> list[SimulatedRequest]:
    """Returns Mooncake's hour of conversations, whose prompts share blocks."""
    path = find_mooncake()
    return [] if path is None else list(mooncake(path).requests)


def agents(folder: Path, count: int = 1000) -> list[SimulatedRequest]:
    """Returns an hour in which `count` of the recorded sessions of agents begin, each with blocks of its own.

    They begin as a Poisson process whose rate is low for twenty minutes, high for twenty and low again.
    """
    with lzma.open(folder / "agent_sessions.jsonl.xz", "rt") as lines:
        rows = sorted((json.loads(line) for line in lines), key=lambda row: (row["session"], row["at_s"]))
    sessions = [list(group) for _, group in groupby(rows, key=lambda row: row["session"])]
    dice, per_block = Random(4), BLOCK_TOKENS // AGENT_BLOCK_TOKENS
    requests: list[SimulatedRequest] = []
    for number in range(count):
        begin_s = (dice.random() + (1 if dice.random() < 0.6 else dice.choice((0, 2)))) * HOUR_S / 3
        for row in dice.choice(sessions):
            chain = row["block_ids"][per_block - 1 :: per_block]
            blocks = tuple(hash((number, block)) & 0x7FFFFFFFFFFF for block in chain)
            at_s = begin_s + row["at_s"]
            tokens = max(1, row["input_tokens"])
            requests.append(SimulatedRequest(0, at_s, tokens, max(1, row["output_tokens"]), blocks, number))
    return _in_order(request for request in requests if request.arrival_s < HOUR_S)


def in_bursts(requests: Sequence[SimulatedRequest]) -> list[SimulatedRequest]:
    """Returns the same requests, of which a share arrives in one burst a period: several times the rate of the rest."""
    dice = Random(5)
    begins: dict[int, float] = {}
    moved = []
    for request in requests:
        period = int(request.arrival_s / PERIOD_S)
        begin_s = begins.setdefault(period, (period + 0.8 * dice.random()) * PERIOD_S)
        at_s = request.arrival_s
        if dice.random() < BURST_SHARE:
            at_s = begin_s + (at_s / PERIOD_S - period) * BURST_S
        moved.append(replace(request, arrival_s=at_s))
    return _in_order(moved)


def in_turn(first: Sequence[SimulatedRequest], second: Sequence[SimulatedRequest]) -> list[SimulatedRequest]:
    """Returns two loads of one service: in each period the requests of one arrive in a burst, and those of the other in
    the next period's. What does not burst in a period is left out, so that the kinds of work come in turn.
    """
    bursts = [in_bursts(load) for load in (first, second)]
    kept = [r for which, load in enumerate(bursts) for r in load if int(r.arrival_s / PERIOD_S) % 2 == which]
    return _in_order(kept)


def noise(seed: int = 6, rate: float = 4.0) -> list[SimulatedRequest]:
    """Returns an hour of requests at an even rate, of lengths that vary as Azure's do: no reason to scale."""
    dice, blocks, now_s = Random(seed), Blocks(BLOCK_TOKENS), 0.0
    requests = []
    while (now_s := now_s + dice.expovariate(rate)) < HOUR_S:
        prompt = min(8000, max(20, int(dice.lognormvariate(6.6, 1.0))))
        output = min(1000, max(5, int(dice.lognormvariate(5.0, 0.8))))
        requests.append(SimulatedRequest(0, now_s, prompt, output, blocks.grow((), prompt)[1]))
    return _in_order(requests)


def all_loads(folder: Path) -> Iterator[tuple[str, list[SimulatedRequest]]]:
    """Yields every load with its name; those whose trace is absent are left out."""
    found = {"mooncake": mooncake_hour()}
    if (folder / "azure_conversation_2023.csv.xz").is_file():
        found = {"azure": azure(folder), **found}
    if (folder / "agent_sessions.jsonl.xz").is_file():
        found["agents"] = agents(folder)
    for name, requests in found.items():
        if requests:
            yield name, requests
            yield f"{name}, bursts", in_bursts(requests)


def _in_order(requests: Iterable[SimulatedRequest]) -> list[SimulatedRequest]:
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    return [replace(request, number=number) for number, request in enumerate(ordered)]


def _seconds(timestamp: str) -> float:
    moment = datetime.fromisoformat(timestamp[:26])
    return moment.hour * 3600 + moment.minute * 60 + moment.second + moment.microsecond / 1e6
