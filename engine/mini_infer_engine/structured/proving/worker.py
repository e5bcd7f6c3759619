"""Proves one grammar in a process that was forked for it: sets limits, then does what an engine will do with the
grammar.

Its limits are stricter than those of the engine's core (a 16th of its stack), so that what passes here is safe to
compile there. The process ends after one grammar, which frees all memory that the grammar took.
"""

import contextlib
import json
import os
import random
import resource
import signal
import time
from collections.abc import Iterator

from llguidance import LLMatcher, LLTokenizer

from mini_infer_engine.structured.limits import (
    MAX_CPU_S,
    MAX_GRAMMAR_BYTES,
    MAX_MASK_S,
    PROOF_STACK_BYTES,
)
from mini_infer_engine.structured.parser_limits import parser_limits
from mini_infer_engine.structured.proving.dead_ends import DEAD_END, has_dead_pattern, is_dead_end
from mini_infer_engine.structured.proving.messages import Proof

LONGEST_FAULT = 1000
"""Most characters of an error: llguidance shows where in a grammar it is, and lines may be long."""
_SMALL = json.dumps(
    {
        "grammars": [
            {
                "json_schema": {
                    "type": "object",
                    "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"type": "number"}}},
                    "required": ["a", "b"],
                    "x-guidance": {"whitespace_flexible": True},
                }
            }
        ]
    }
)
"""A small grammar that a worker proves before it has a job."""
_WALKS = 4
_WALK_STEPS = 16
_FEWEST_STEPS = 4
_WALK_S = 0.006
"""Seconds of all walks after which each walk stops at its first few masks: the client waits."""


def limit_this_process() -> None:
    """Sets the limits of one proof. The kernel enforces them by signals that nothing here can catch or delay.

    Python raises MemoryError if it meets the limit of memory before the library does.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust writes about panics and failed allocations of this grammar
    size, _ = _memory_bytes()
    limits = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_STACK, PROOF_STACK_BYTES),
        (resource.RLIMIT_AS, size + MAX_GRAMMAR_BYTES + PROOF_STACK_BYTES),
        (resource.RLIMIT_CPU, int(MAX_CPU_S) + 2),  # whole seconds; the timer below is the exact limit
    ]
    for name, value in limits:
        with contextlib.suppress(ValueError, OSError):  # a hard limit of this machine is lower already
            resource.setrlimit(name, (value, value))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)


def warm_up(tokenizer: LLTokenizer) -> int:
    """Proves a small grammar, so that this process has the pages that every proof writes to before a client waits.

    With a vocabulary of 151,936, half of a proof's time was page faults. Returns the resident bytes before, from which
    the proof counts the memory of its grammar.
    """
    _, before = _memory_bytes()
    _fault(tokenizer, _SMALL)
    return before


def prove(tokenizer: LLTokenizer, text: str, bytes_before: int | None = None) -> Proof:
    """Compiles the grammar and follows a few random outputs through their first masks.

    `bytes_before` is the result of `warm_up`, if it was called.
    """
    before, started = _memory_bytes()[1] if bytes_before is None else bytes_before, time.process_time()
    fault = _fault(tokenizer, text)
    grown = max(0, _memory_bytes()[1] - before)
    return Proof(fault[:LONGEST_FAULT], grown, time.process_time() - started)


def _fault(tokenizer: LLTokenizer, text: str) -> str:
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())
    if matcher.is_error():
        return matcher.get_error().strip() or "it does not compile"
    if has_dead_pattern(tokenizer, text):
        return DEAD_END
    for pattern in patterns_in(text):
        if fault := _next_token(_alone(tokenizer, pattern), random.Random(0)):
            return f"pattern {pattern[:40]!r}: {fault}"
    started = time.perf_counter()
    for seed in range(_WALKS):
        output, chooser = matcher.deep_copy(), random.Random(seed)
        for step in range(_WALK_STEPS):
            if step >= _FEWEST_STEPS and time.perf_counter() - started > _WALK_S:
                break
            if fault := _next_token(output, chooser):
                return fault
            if output.is_stopped():
                break
    return ""


def patterns_in(text: str) -> Iterator[str]:
    """Yields the regexes of a grammar's schemas. A lexer compiles one only when an output comes to it."""
    if '"pattern' not in text:
        return
    found, pending = set[str](), [json.loads(text)]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending += item
        elif isinstance(item, dict):
            pending += item.values()
            named = item.get("patternProperties")
            found |= {item["pattern"]} if isinstance(item.get("pattern"), str) else set()
            found |= set(named) if isinstance(named, dict) else set()
    yield from sorted(found)


def _alone(tokenizer: LLTokenizer, pattern: str) -> LLMatcher:
    """Returns a matcher whose output begins within a string of this pattern."""
    schema = {"type": "string", "pattern": pattern}
    output = LLMatcher(
        tokenizer, json.dumps({"grammars": [{"json_schema": schema}]}), log_level=0, limits=parser_limits()
    )
    output.try_consume_tokens(tokenizer.tokenize_str('"'))
    return output


def _next_token(output: LLMatcher, chooser: random.Random) -> str:
    """Advances by one random token. Returns why the output cannot continue; empty if it can, or is complete."""
    started = time.process_time()
    mask = output.compute_bitmask()
    if (took := time.process_time() - started) > MAX_MASK_S:
        return f"one of its first masks takes {took:.2f} s of CPU, and at most {MAX_MASK_S:g} are allowed: simplify it"
    if is_dead_end(output):
        return DEAD_END
    if output.is_error():
        return f"{output.get_error().strip().partition(chr(10))[0]}: simplify it"
    if output.is_stopped():
        return ""
    if (token := _allowed_token(mask, chooser)) is None:
        return DEAD_END
    output.consume_token(token)
    return output.get_error().partition("\n")[0].strip() if output.is_error() else ""


def _allowed_token(mask: bytes, chooser: random.Random) -> int | None:
    """Returns the id of a token whose bit is set, at or after a random place, or None if no bit is.

    With a large vocabulary, listing all allowed ids would take longer than the mask itself.
    """
    place = chooser.randrange(len(mask))
    for begin in (place, 0):
        if rest := mask[begin:].lstrip(b"\0"):
            bits = [bit for bit in range(8) if rest[0] >> bit & 1]
            return 8 * (len(mask) - len(rest)) + bits[chooser.randrange(len(bits))]
    return None


def _memory_bytes() -> tuple[int, int]:
    """Returns the size of the address space, and the resident bytes that no file shares."""
    with open("/proc/self/statm") as file:  # pathlib would allocate what is measured here
        size, resident, shared = (int(pages) * resource.getpagesize() for pages in file.read().split()[:3])
    return size, resident - shared
