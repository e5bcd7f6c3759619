"""What attackers share: findings, and a request whose answer only has to be an answer."""

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

ANSWER_LIMIT_S = 90.0
"""A request that gets no answer for so long counts as hung; busy machines take their time."""


@dataclass(slots=True)
class Findings:
    """Counts by attacker and outcome, and what must not be."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def count(self, attacker: str, outcome: object) -> None:
        """Counts one attempt of an attacker."""
        self.outcomes[f"{attacker}: {outcome}"] += 1

    def note(self, line: str) -> None:
        """Notes what must not be; a fault that repeats is told a hundred times at most."""
        if len(self.wrong) < 100:
            self.wrong.append(line)


async def post(
    url: str,
    body: Any,
    found: Findings,
    attacker: str,
    headers: dict[str, str] | None = None,
    give_up_s: float = 0.0,
    *,
    may_fail: bool = False,
) -> None:
    """Sends one JSON body. Any status but 500 is an answer; a 500 or a hang is a fault.

    With `give_up_s` the client leaves after so long, as impatient ones do. With `may_fail` a 500 is the answer of a
    hostile endpoint, which the gateway hands on.
    """
    timeout = aiohttp.ClientTimeout(total=give_up_s or ANSWER_LIMIT_S)
    wire = json.dumps(body, default=repr).encode("utf-8", "surrogatepass")
    headers = {"content-type": "application/json", **(headers or {})}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(url, data=wire, headers=headers) as got,
        ):
            await got.read()
            found.count(attacker, got.status)
            if got.status == 500 and not may_fail:
                found.note(f"{attacker}: 500 from {url}: {(await got.text())[:300]}; body {str(body)[:600]}")
    except TimeoutError:
        found.count(attacker, "left" if give_up_s else "hang")
        if not give_up_s:
            found.note(f"{attacker}: no answer in {ANSWER_LIMIT_S:.0f} s; body {str(body)[:600]}")
    except (aiohttp.ClientError, ValueError, UnicodeError, OverflowError) as error:
        found.count(attacker, type(error).__name__)
    except asyncio.IncompleteReadError:
        found.count(attacker, "cut")
