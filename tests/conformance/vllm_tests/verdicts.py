"""What is expected of each of vLLM's server tests, and how it differs from what was seen. Pure, but for one file.

expected.yaml: file -> test -> `pass`, or one word for a group with the reason: `{MODEL: why}`, `{DIFFERS: why}`, ...
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

EXPECTED = Path(__file__).parent / "expected.yaml"
PASS = "pass"
MODEL = "needs a cleverer model"
DIFFERS = "differs on purpose"
NOT_A_SERVER_TEST = "not a server test"
"""It calls vLLM's own modules, or is skipped by vLLM itself."""
MISSING = "not built yet"
REASONS = (MODEL, DIFFERS, NOT_A_SERVER_TEST, MISSING)

Verdict = str | dict[str, str]
Expected = dict[str, dict[str, Verdict]]


@dataclass(frozen=True, slots=True)
class Seen:
    """One test's outcome, "passed", "failed" or "skipped", and the beginning of its message."""

    outcome: str
    message: str = ""


def read(path: Path = EXPECTED) -> Expected:
    """The committed list; empty where there is none yet."""
    return (yaml.safe_load(path.read_text()) or {}) if path.exists() else {}


def write(expected: Expected, path: Path = EXPECTED) -> None:
    """The list in the order of files and tests, under the comment that it begins with."""
    head = "# Every server test of vLLM 0.26.0 that runs here; see verdicts.py for the words.\n"
    path.write_text(head + yaml.safe_dump(expected, width=118, allow_unicode=True, sort_keys=True))


def outcome_of(verdict: Verdict) -> str:
    """What a test with this verdict is to do."""
    if verdict == PASS:
        return "passed"
    return "skipped" if isinstance(verdict, dict) and NOT_A_SERVER_TEST in verdict else "failed"


def differences(expected: Expected, seen: dict[str, Seen], whole_files: Iterable[str] = ()) -> list[str]:
    """One line for each test that is not listed, did something else, or, of a file that ran whole, did not run."""
    lines = []
    for key, found in seen.items():
        file, _, test = key.partition("::")
        verdict = expected.get(file, {}).get(test)
        if verdict is None:
            lines.append(f"{key}: {found.outcome}, and not listed. {found.message}")
        elif outcome_of(verdict) != found.outcome:
            lines.append(f"{key}: {found.outcome}, listed as {verdict}. {found.message}")
    for file in whole_files:
        lines += [f"{file}::{test}: did not run" for test in expected.get(file, {}) if f"{file}::{test}" not in seen]
    return lines


def merged(expected: Expected, seen: dict[str, Seen]) -> Expected:
    """The list with what was seen; reasons that still hold are kept, new failures get the message to be judged."""
    result: Expected = {file: dict(tests) for file, tests in expected.items()}
    for key, found in seen.items():
        file, _, test = key.partition("::")
        old = result.get(file, {}).get(test)
        is_to_be_judged = isinstance(old, dict) and MISSING in old
        if old is None or is_to_be_judged or outcome_of(old) != found.outcome:
            result.setdefault(file, {})[test] = _guess(found)
    return result


def _guess(found: Seen) -> Verdict:
    if found.outcome == "passed":
        return PASS
    return {NOT_A_SERVER_TEST if found.outcome == "skipped" else MISSING: found.message[:200]}


def counts(seen: dict[str, Seen]) -> str:
    """As pytest says it."""
    numbers = Counter(found.outcome for found in seen.values())
    return ", ".join(f"{numbers[kind]} {kind}" for kind in ("passed", "failed", "skipped"))


def by_verdict(expected: Expected) -> dict[str, int]:
    """How many tests have each verdict."""
    words = [v if isinstance(v, str) else next(iter(v)) for tests in expected.values() for v in tests.values()]
    return dict(Counter(words))
