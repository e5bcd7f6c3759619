import time
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from mini_infer_engine.core.grammars.compiler import GrammarCompiler
from mini_infer_engine.core.grammars.mask_filler import EpsilonGreedy, MaskFiller
from mini_infer_engine.core.grammars.matcher import words_of
from mini_infer_engine.dry.vocabulary import EOS_TOKEN_IDS, VOCAB_SIZE, dry_assets
from mini_infer_engine.structured.grammar import of_regex
from mini_infer_engine.structured.limits import MAX_MASK_S

EXPRESSIONS = ["[0-9]{2,6}", "(yes|no)", "a*", "[^b]+"] * 5


@pytest.fixture(scope="module")
def matchers() -> list[LLMatcher]:
    compiler = GrammarCompiler(lambda: dry_assets().files["tokenizer.json"], VOCAB_SIZE, EOS_TOKEN_IDS)
    return [compiler.compile(of_regex(expression)).result() for expression in EXPRESSIONS]


def chosen(times_s: list[float], fills: int) -> list[int]:
    bandit, found = EpsilonGreedy(len(times_s)), []
    for _ in range(fills):
        found.append(bandit.choose())
        bandit.took(found[-1], times_s[found[-1]])
    return found


@pytest.mark.parametrize(
    ("times_s", "fastest"),
    [([1e-5, 5e-5], 0), ([5e-5, 1e-5], 1), ([3e-5, 2e-5, 1e-5, 4e-5], 2), ([1e-5], 0)],
)
def test_epsilon_greedy_prefers_the_fastest_arm_and_tries_others_rarely(times_s: list[float], fastest: int) -> None:
    found = chosen(times_s, 10_000)
    assert found.count(fastest) > 9_800
    assert set(found[-4_000:]) == set(range(len(times_s)))


def test_epsilon_greedy_switches_when_another_arm_becomes_faster() -> None:
    bandit = EpsilonGreedy(2)
    times_s = [1e-5, 5e-5]
    for fills in range(10_000):
        if fills == 300:
            times_s = [5e-5, 1e-5]  # a core is free now
        arm = bandit.choose()
        bandit.took(arm, times_s[arm])
    assert bandit.choose() == 1


@pytest.mark.parametrize("threads", [1, 3, 9])
@pytest.mark.parametrize("count", [1, 20])
def test_mask_rows_equal_the_matchers_masks_whatever_the_buffer_held(
    matchers: list[LLMatcher], threads: int, count: int
) -> None:
    filler, words = MaskFiller(threads), words_of(VOCAB_SIZE)
    expected = [np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32) for matcher in matchers[:count]]
    for garbage in [0, *[0xFFFFFFFF] * 20]:  # the first fills go all ways
        bits = np.full((count, words), garbage, dtype=np.uint32)
        filler.fill([(matcher, line) for line, matcher in enumerate(matchers[:count])], bits)
        assert all((line == mask).all() for line, mask in zip(bits, expected, strict=True))


def test_masks_behind_draft_tokens_follow_in_the_next_rows(matchers: list[LLMatcher]) -> None:
    bits = np.zeros((3, words_of(VOCAB_SIZE)), dtype=np.uint32)
    digits = matchers[0].deep_copy()
    MaskFiller(1).fill_behind([(digits, 0, [ord("1"), ord("2")])], bits)
    for line, mask in enumerate(bits):
        assert (mask == np.frombuffer(digits.compute_bitmask(), dtype=np.uint32)).all()
        digits.consume_token(ord("12"[line]) if line < 2 else ord("3"))


class _Broken:
    """A matcher whose mask raises, as no matcher's should."""

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        raise RuntimeError("a lock is poisoned\nand more")


@pytest.mark.parametrize("threads", [1, 4])
def test_only_its_own_row_fails_when_a_matcher_raises(matchers: list[LLMatcher], threads: int) -> None:
    filler, words = MaskFiller(threads), words_of(VOCAB_SIZE)
    jobs: list[Any] = [(matchers[0], 0), (_Broken(), 1), (matchers[1], 2)]
    for _ in range(12):  # all ways
        bits = np.zeros((3, words), dtype=np.uint32)
        assert filler.fill(jobs, bits) == {1: "RuntimeError: a lock is poisoned"}
        assert (bits[0] == np.frombuffer(matchers[0].compute_bitmask(), dtype=np.uint32)).all()
        assert (bits[2] == np.frombuffer(matchers[1].compute_bitmask(), dtype=np.uint32)).all()


class _Slow:
    """A matcher whose masks take longer than any may."""

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        end = time.thread_time() + 1.2 * MAX_MASK_S
        while time.thread_time() < end:
            pass


def test_only_its_own_row_fails_when_a_mask_takes_too_long(matchers: list[LLMatcher]) -> None:
    filler, words = MaskFiller(1), words_of(VOCAB_SIZE)
    jobs: list[Any] = [(matchers[0], 0), (_Slow(), 1)]
    bits = np.zeros((2, words), dtype=np.uint32)
    assert filler.fill(jobs, bits) == {}
    faults = filler.fill(jobs, bits)
    assert list(faults) == [1]
    assert "of CPU" in faults[1]


class _Drafted:
    """A matcher that goes wrong at its first draft token, or is slow there."""

    def __init__(self, *, is_slow: bool) -> None:
        self._is_slow = is_slow
        self._masks = 0

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        self._masks += 1
        if self._is_slow:
            end = time.thread_time() + 1.2 * MAX_MASK_S
            while time.thread_time() < end:
                pass
        elif self._masks == 2:
            raise RuntimeError("a lock is poisoned\nand more")

    def is_stopped(self) -> bool:
        return False

    def consume_token(self, token: int) -> bool:
        return True

    def rollback(self, count: int) -> bool:
        return True


def with_drafts(matchers: list[LLMatcher], line: int) -> tuple[Any, int, list[int]]:
    return matchers[0].deep_copy(), line, [ord("1"), ord("2")]


def masks_along(matcher: LLMatcher, drafts: list[int]) -> list[np.ndarray]:
    output, found = matcher.deep_copy(), []
    for token in [*drafts, None]:
        found.append(np.frombuffer(output.compute_bitmask(), dtype=np.uint32))
        if token is not None:
            output.consume_token(token)
    return found


def test_only_its_own_rows_fail_when_a_matcher_raises_at_a_draft_token(matchers: list[LLMatcher]) -> None:
    jobs: list[Any] = [with_drafts(matchers, 0), (_Drafted(is_slow=False), 3, [1]), with_drafts(matchers, 5)]
    bits = np.zeros((8, words_of(VOCAB_SIZE)), dtype=np.uint32)
    assert MaskFiller(1).fill_behind(jobs, bits) == {3: "RuntimeError: a lock is poisoned"}
    for matcher, line, drafts in (jobs[0], jobs[2]):
        assert all(map(np.array_equal, bits[line:], masks_along(matcher, drafts)))


def test_only_their_own_rows_fail_when_masks_of_drafts_take_too_long(
    matchers: list[LLMatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    filler = MaskFiller(1)
    monkeypatch.setattr(filler._drafts, "_together", lambda jobs, bits: time.sleep(1.2 * MAX_MASK_S))
    jobs: list[Any] = [with_drafts(matchers, 0), (_Drafted(is_slow=True), 3, [1])]
    bits = np.zeros((5, words_of(VOCAB_SIZE)), dtype=np.uint32)
    assert filler.fill_behind(jobs, bits) == {}
    faults = filler.fill_behind(jobs, bits)
    assert list(faults) == [3]
    assert "of CPU" in faults[3]
    assert all(map(np.array_equal, bits, masks_along(jobs[0][0], jobs[0][2])))


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(("index", "text"), [(0, ""), (0, "12"), (0, "123456"), (1, "yes"), (2, "aaa")])
def test_masks_of_drafts_are_the_same_when_they_are_filled_one_by_one(
    matchers: list[LLMatcher], index: int, text: str, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    matcher, drafts = matchers[index].deep_copy(), [*text.encode(), *(EOS_TOKEN_IDS[:1] if ends else ())]
    drafts = drafts[: matcher.validate_tokens(drafts)]
    shape = (len(drafts) + 1, words_of(VOCAB_SIZE))
    together, alone = np.zeros(shape, dtype=np.uint32), np.zeros(shape, dtype=np.uint32)
    MaskFiller(1).fill_behind([(matcher, 0, drafts)], together)
    filler = MaskFiller(1)
    monkeypatch.setattr(filler._drafts, "_was_slow", True)
    assert filler.fill_behind([(matcher, 0, drafts)], alone) == {}
    assert np.array_equal(together, alone)
    assert matcher.compute_bitmask() == matchers[index].compute_bitmask(), "it has taken none of them"
