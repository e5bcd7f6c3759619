"""Sequences held to grammars, in an engine whose model chooses at random among what it may choose."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.grammars.compiler import GrammarCompiler
from mini_infer_engine.core.request import Output, Request, SamplingParams
from mini_infer_engine.dry.vocabulary import EOS_TOKEN_IDS, TURN_END_ID, VOCAB_SIZE, dry_assets
from mini_infer_engine.structured.grammar import Grammar, of_choice, of_json_schema, of_lark, of_regex
from tests.support.fake_runner import FakeRunner

POINT = of_json_schema({"type": "object", "properties": {"x": {"enum": [1, 20, 300]}}, "required": ["x"]}, strict=True)
CLOSED = of_json_schema(
    {
        "type": "object",
        "properties": {
            "x": {"enum": [1, 20, 300]},
            "y": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        },
        "required": ["x", "y"],
        "additionalProperties": False,
    }
)
DIGITS = of_regex("[0-9]{2,6}")


@dataclass
class Answer:
    token_ids: list[int]
    finish_reason: str = ""
    error: str = ""
    is_refusal: bool = False
    ends_in_text: bool = False
    stop_reason: int | None = None

    @property
    def text(self) -> str:
        ids = self.token_ids if self.ends_in_text or self.finish_reason != "stop" else self.token_ids[:-1]
        return bytes(ids).decode()


class Bench:
    """An engine on the fake runner over a vocabulary of bytes."""

    def __init__(
        self,
        *,
        depth: int = 1,
        num_pages: int = 400,
        num_host_pages: int = 0,
        with_grammars: bool = True,
        num_tier_pages: int = 0,
        **settings: Any,
    ) -> None:
        self.runner = FakeRunner(
            num_pages, 16, num_host_pages=num_host_pages, num_tier_pages=(num_tier_pages, 0), loads_by_layer=True
        )
        grammars = GrammarCompiler(lambda: dry_assets().files["tokenizer.json"], VOCAB_SIZE, EOS_TOKEN_IDS)
        self.engine = Engine(
            EngineSettings(model="fake", step_depth=depth, **settings),  # type: ignore[arg-type]  # names come as text
            self.runner,
            EOS_TOKEN_IDS,
            480,
            "revision",
            grammars=grammars if with_grammars else None,
        )
        self.runner.references = self.engine.scheduler.kv_cache.pool.references
        self.answers: dict[str, Answer] = {}

    def add(
        self,
        request_id: str,
        grammar: Grammar | None,
        resumed: Sequence[int] = (),
        *,
        priority: int = 0,
        **sampling_fields: Any,
    ) -> None:
        sampling = SamplingParams(**({"max_tokens": 100, "grammar": grammar} | sampling_fields))
        prompt = [ord(character) for character in f"prompt of {request_id}"]
        noise_seed = random.Random(request_id).randrange(2**31)
        self.answers[request_id] = Answer(list(resumed))
        self.engine.add(
            Request(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling=sampling,
                noise_seed=noise_seed,
                resumed_token_ids=resumed,
                priority=priority,
            )
        )

    def step(self) -> None:
        for output in self.engine.step():
            self._take(output)

    def _take(self, output: Output) -> None:
        answer = self.answers[output.request_id]
        assert not answer.finish_reason, "an output after the last"
        answer.token_ids += output.token_ids
        answer.finish_reason = output.finish_reason or ""
        answer.error, answer.is_refusal = output.error, output.is_refusal
        answer.ends_in_text, answer.stop_reason = output.ends_in_text, output.stop_reason

    def run(self) -> dict[str, Answer]:
        for _ in range(5000):
            if not self.engine.has_work:
                assert self.engine._outputs.num_constrained == 0
                assert not self.engine.scheduler.running
                return self.answers
            self.step()
        raise AssertionError("it does not end")

    def one(self, grammar: Grammar | None, resumed: Sequence[int] = (), **sampling_fields: Any) -> Answer:
        self.add("one", grammar, resumed, **sampling_fields)
        return self.run()["one"]


DEPTHS = pytest.mark.parametrize("depth", [0, 1])


@DEPTHS
def test_outputs_match_their_grammars_when_others_have_none(depth: int) -> None:
    bench = Bench(depth=depth, max_num_seqs=7, max_num_batched_tokens=20)
    for index in range(30):
        bench.add(str(index), [CLOSED, DIGITS, of_choice(["yes", "no"]), None][index % 4], max_tokens=60)
    answers = bench.run()
    for index in range(30):
        answer = answers[str(index)]
        assert answer.finish_reason in ("stop", "length"), answer
        if index % 4 == 0:
            assert answer.finish_reason == "length" or json.loads(answer.text)["x"] in (1, 20, 300)
        elif index % 4 == 1:
            assert answer.text.isdigit()
            assert 2 <= len(answer.text) <= 6
        elif index % 4 == 2:
            assert answer.text in ("yes", "no")
            assert (answer.finish_reason, answer.ends_in_text, answer.stop_reason) == ("stop", True, None)


@DEPTHS
def test_outputs_without_grammar_are_unchanged_when_others_have_one(depth: int) -> None:
    alone, beside = Bench(depth=depth), Bench(depth=depth)
    for bench in (alone, beside):
        for index in range(5):
            bench.add(f"free{index}", None, max_tokens=40, ignore_eos=True)
    for index in range(5):
        beside.add(f"held{index}", CLOSED, max_tokens=40)
    expected = alone.run()
    found = beside.run()
    assert all(found[name].token_ids == answer.token_ids for name, answer in expected.items())


@pytest.mark.parametrize("num_host_pages", [0, 40])
@DEPTHS
def test_constrained_outputs_are_unchanged_by_depth_pages_preemption_and_swap(depth: int, num_host_pages: int) -> None:
    roomy = Bench(depth=0)
    tight = Bench(depth=depth, num_pages=30, num_host_pages=num_host_pages, max_num_batched_tokens=16)
    names = [str(index) for index in range(24)]
    for bench in (roomy, tight):
        for name in names:
            bench.add(name, CLOSED, max_tokens=400)
    expected, found = roomy.run(), tight.run()
    assert tight.engine.stats().preemptions, "the test is to preempt"
    assert bool(tight.engine.scheduler.kv_cache.num_swaps) == bool(num_host_pages)
    assert [found[name] for name in names] == [expected[name] for name in names]


@DEPTHS
def test_a_constrained_output_is_resumed_from_another_engines_tokens(depth: int) -> None:
    whole = Bench(depth=depth).one(CLOSED, max_tokens=400)
    assert whole.finish_reason == "stop"
    for count in (1, len(whole.token_ids) // 2, len(whole.token_ids) - 1):
        again = Bench(depth=depth).one(CLOSED, whole.token_ids[:count], max_tokens=400)
        assert again == whole
    ended = Bench(depth=depth).one(CLOSED, whole.token_ids, max_tokens=400)
    assert (ended.token_ids, ended.finish_reason) == (whole.token_ids, "stop")
    wrong = Bench(depth=depth).one(CLOSED, list(b"no JSON"), max_tokens=400)
    assert (wrong.finish_reason, wrong.is_refusal) == ("error", True)
    assert "is none that the grammar describes" in wrong.error


@DEPTHS
def test_eos_is_chosen_only_when_the_grammar_may_end(depth: int) -> None:
    ends = set()
    for index in range(40):
        bench = Bench(depth=depth)
        bench.add(f"r{index}", of_regex("a{2}(b{3})*"), max_tokens=30)
        answer = bench.run()[f"r{index}"]
        assert answer.finish_reason in ("stop", "length")
        if answer.finish_reason == "stop":
            assert not answer.ends_in_text
            assert answer.token_ids[-1] in EOS_TOKEN_IDS
            assert (len(answer.text) - 2) % 3 == 0
        ends.add(answer.finish_reason)
    assert "stop" in ends


@DEPTHS
def test_stop_tokens_are_allowed_only_when_the_grammar_may_end(depth: int) -> None:
    letter = ord("b")
    reasons = set()
    for index in range(30):
        bench = Bench(depth=depth)
        bench.add(f"s{index}", of_regex("[ab]{2}(c[ab]{2})*"), stop_token_ids=[letter, ord("#")], max_tokens=50)
        answer = bench.run()[f"s{index}"]
        assert letter not in answer.token_ids[:-1]
        reasons.add(answer.stop_reason)
        assert len(answer.text) % 3 == 2 or answer.finish_reason == "length"
    assert reasons >= {letter, ord("#")}


def test_an_output_finishes_when_its_grammar_ends_whatever_eos_and_min_tokens() -> None:
    assert Bench().one(of_choice(["yes"]), ignore_eos=True, min_tokens=20).text == "yes"
    long = Bench().one(of_regex("a+"), ignore_eos=True, max_tokens=30)
    assert (long.text, long.finish_reason) == ("a" * 30, "length")
    at_least = Bench().one(of_regex("a+"), min_tokens=20, max_tokens=30)
    assert len(at_least.text) >= 20
    exact = Bench().one(of_choice(["yes"]), max_tokens=3)
    assert (exact.text, exact.finish_reason) == ("yes", "stop")
    empty = Bench().one(of_choice([""]), min_tokens=3)
    assert (empty.token_ids, empty.finish_reason) == ([], "stop")


@pytest.mark.parametrize(
    ("grammar", "sampling_fields", "message_part"),
    [
        (of_choice(["yes"]), {"allowed_token_ids": list(b"no")}, "allowed_token_ids leave no token"),
        (of_choice(["yes"]), {"stop_token_ids": [ord("y")]}, "stop_token_ids leave no token"),
        (of_choice(["yes"]), {"bad_words_token_ids": [[ord("y")]]}, "bad_words leave no token"),
        (of_choice(["yes"]), {"bad_words_token_ids": [[ord("e"), ord("s")]]}, "bad_words leave no token"),
        (of_regex("a?"), {"min_tokens": 2, "allowed_token_ids": [0, 257, 258]}, "allowed_token_ids and min_tokens"),
        (of_choice(["yes"]), {"allowed_token_ids": list(b"ys"), "bad_words_token_ids": [[1]]}, "allowed_token_ids and"),
    ],
)  # fmt: skip
@DEPTHS
def test_only_its_own_request_ends_when_no_token_is_allowed(
    depth: int, grammar: Grammar, sampling_fields: dict[str, Any], message_part: str
) -> None:
    bench = Bench(depth=depth)
    bench.add("other", DIGITS)
    bench.add("one", grammar, **sampling_fields)
    bench.add("free", None, max_tokens=9, ignore_eos=True)
    answers = bench.run()
    assert (answers["one"].finish_reason, answers["one"].is_refusal) == ("error", True)
    assert message_part in answers["one"].error
    assert answers["other"].text.isdigit()
    assert len(answers["free"].token_ids) == 9


def test_allowed_and_bad_tokens_apply_within_a_grammar() -> None:
    for index in range(10):
        bench = Bench()
        sampling_fields = {"allowed_token_ids": list(b"123"), "bad_words_token_ids": [[ord("1"), ord("2")], [ord("3")]]}
        bench.add(f"a{index}", of_regex("[0-9]{4}"), **sampling_fields)
        text = bench.run()[f"a{index}"].text
        assert set(text) <= {"1", "2"}
        assert "12" not in text


def test_only_its_own_request_is_refused_when_a_grammar_does_not_compile() -> None:
    bench = Bench()
    bench.add("wrong", of_lark("start: @nowhere"))
    bench.add("right", DIGITS)
    answers = bench.run()
    assert (answers["wrong"].finish_reason, answers["wrong"].is_refusal) == ("error", True)
    assert answers["wrong"].error.startswith("structured_outputs cannot be enforced: ")
    assert "\n" not in answers["wrong"].error
    assert answers["right"].text.isdigit()


DOUBLING = "\n".join(f"a{level}: a{level + 1} a{level + 1}" for level in range(40))


@pytest.mark.parametrize(
    "grammar",
    [of_lark(f'start: a0\n{DOUBLING}\na40: "x"'), of_regex(r"(\w+\s?\p{L}{1,200}){200}")],
    ids=["too many items", "too many expressions"],
)
@DEPTHS
def test_only_its_own_request_is_refused_when_a_grammar_exceeds_its_limits(depth: int, grammar: Grammar) -> None:
    bench = Bench(depth=depth)
    bench.add("grows", grammar, max_tokens=400)
    bench.add("right", DIGITS)
    answers = bench.run()
    assert (answers["grows"].finish_reason, answers["grows"].is_refusal) == ("error", True)
    assert answers["grows"].error.startswith("structured_outputs cannot be enforced any further: ")
    assert answers["grows"].error.endswith("simplify it")
    assert answers["right"].text.isdigit()


def test_a_grammar_is_refused_when_there_is_no_tokenizer() -> None:
    with pytest.raises(ValueError, match="structured_outputs needs a tokenizer"):
        Bench(with_grammars=False).add("one", DIGITS)


@DEPTHS
def test_constrained_requests_can_be_aborted_at_any_moment(depth: int) -> None:
    bench = Bench(depth=depth, max_num_seqs=4)
    for moment in range(12):
        bench.add(f"gone{moment}", CLOSED, max_tokens=400)
        bench.add(f"kept{moment}", DIGITS)
        for _ in range(moment):
            bench.step()
        bench.engine.abort(f"gone{moment}")
    answers = bench.run()
    assert all(answers[f"kept{moment}"].text.isdigit() for moment in range(12))
    assert bench.engine.stats().waiting == 0
    assert bench.engine.scheduler.kv_cache.pool.usage == 0


@pytest.mark.parametrize("what", ["launch_error", "collect_error", "sample_error"])
@DEPTHS
def test_requests_fail_and_nothing_leaks_when_a_pass_fails_at_any_stage(depth: int, what: str) -> None:
    bench = Bench(depth=depth)
    for index in range(3):
        bench.add(f"first{index}", CLOSED, max_tokens=400)
    while not any(answer.token_ids for answer in bench.answers.values()):
        bench.step()
    setattr(bench.runner, what, RuntimeError("the device is gone"))
    bench.step()
    bench.step()
    bench.add("later", DIGITS)
    answers = bench.run()
    assert any("the device is gone" in answers[f"first{index}"].error for index in range(3))
    assert answers["later"].text.isdigit()
    assert bench.engine.scheduler.kv_cache.pool.usage == 0


def test_special_tokens_do_not_match_text_of_a_grammar() -> None:
    for index in range(20):
        bench = Bench()
        bench.add(str(index), of_regex(r"(.|\n)*"), max_tokens=60)
        answer = bench.run()[str(index)]
        assert all(token < 256 for token in answer.token_ids[:-1])
        assert answer.token_ids[-1] <= TURN_END_ID or answer.token_ids[-1] in EOS_TOKEN_IDS


def test_the_next_forward_is_launched_before_outputs_are_emitted() -> None:
    """The device is then never without work while the caller looks at outputs, and masks are made beside a forward."""
    bench, calls = Bench(max_num_seqs=4), list[str]()

    def note(name: str) -> None:
        call = getattr(bench.runner, name)

        def noted(*arguments: Any) -> Any:
            is_by_engine = (
                name != "sample" or arguments[1] is not None
            )  # else the runner's own, of a pass without masks
            calls.extend([name] if is_by_engine else [])
            return call(*arguments)

        setattr(bench.runner, name, noted)

    for name in ("launch", "sample", "collect"):
        note(name)
    for index in range(3):
        bench.add(str(index), of_regex("[a-z]{20,30}"))
    while bench.engine._num_compiling:
        bench.step()
    steps = []
    for _ in range(10):
        calls.clear()
        bench.step()
        steps.append(list(calls))
    assert steps[-5:] == [["collect", "sample", "launch"]] * 5
    answers = bench.run()
    assert all(20 <= len(answer.text) <= 30 for answer in answers.values())


def test_nothing_leaks_when_a_request_is_aborted_behind_a_forward_awaiting_masks() -> None:
    bench = Bench(max_num_seqs=4)
    for name in "ab":
        bench.add(name, of_regex("[a-z]{20,30}"))
    while not bench.engine._waits_for_masks or len(bench.answers["a"].token_ids) < 3:
        bench.step()
    bench.engine.abort("a")
    answers = bench.run()
    assert len(answers["a"].token_ids) < 20
    assert 20 <= len(answers["b"].text) <= 30
    assert not any(bench.engine.scheduler.kv_cache.pool.references)


@DEPTHS
def test_requests_wait_when_the_grammars_in_flight_take_all_memory_that_they_may(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mini_infer_engine.core.grammars.compiler.MAX_RUNNING_BYTES", 2000)
    bench = Bench(depth=depth)
    grammars = [msgspec.structs.replace(of_regex(f"{index}[a-z]{{3}}"), num_bytes=900) for index in range(6)]
    for index, grammar in enumerate([*grammars, *grammars]):
        bench.add(str(index), grammar)
    bench.add("free", None)
    bench.engine.abort("11")
    compiler, most = bench.engine._constraints._compiler, 0
    while bench.engine.has_work:
        bench.step()
        most = max(most, compiler.running_bytes)
    assert 0 < most <= 2000
    assert compiler.running_bytes == 0
    for index in range(11):
        assert bench.answers[str(index)].text.startswith(str(index % 6)), bench.answers[str(index)]
    assert bench.answers["free"].finish_reason
    assert not bench.answers["11"].finish_reason


def test_a_request_of_higher_priority_is_compiled_first_when_several_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_infer_engine.core.grammars.compiler.MAX_RUNNING_BYTES", 1000)
    bench, ended = Bench(), []
    for index, priority in enumerate([0, 0, -1]):
        grammar = msgspec.structs.replace(of_regex(f"{index}[a-z]{{3}}"), num_bytes=900)
        bench.add(str(index), grammar, priority=priority)
    while bench.engine.has_work:
        bench.step()
        ended += [name for name, answer in bench.answers.items() if answer.finish_reason and name not in ended]
    assert ended == ["0", "2", "1"]


def test_memory_is_free_again_when_a_grammar_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_infer_engine.core.grammars.compiler.MAX_RUNNING_BYTES", 1000)
    bench = Bench()
    bench.add("bad", Grammar('{"grammars": [{"lark_grammar": "start: missing"}]}', num_bytes=900))
    bench.add("good", msgspec.structs.replace(DIGITS, num_bytes=900))
    answers = bench.run()
    assert answers["bad"].error
    assert answers["good"].text.isdigit()
