"""Compiled grammars over vocabularies of other sizes than the model's, and the memory that they may take."""

import json
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.grammars import compiler as compiler_module
from mini_infer_engine.core.grammars.compiler import GrammarCompiler
from mini_infer_engine.core.request import Output, Request, SamplingParams
from mini_infer_engine.dry.vocabulary import EOS_TOKEN_IDS, VOCAB_SIZE, dry_assets
from mini_infer_engine.structured.grammar import Grammar, of_json_schema, of_regex
from mini_infer_engine.structured.limits import MAX_KEPT_BYTES, MAX_RUNNING_BYTES
from mini_infer_engine.structured.params import GrammarRequest
from mini_infer_engine.structured.thinking import within_budget
from tests.support.random_runner import RandomRunner

CLOSED = of_json_schema(
    {"type": "object", "properties": {"x": {"enum": [1, 20]}}, "required": ["x"], "additionalProperties": False}
)
ANSWER = GrammarRequest("response_format", lambda special: CLOSED)


def tokenizer_json(extra: int = 0) -> str:
    """The dry run's, with so many added tokens behind those that the model has."""
    document: dict[str, Any] = json.loads(dry_assets().files["tokenizer.json"])
    one = document["added_tokens"][-1]
    added = [one | {"id": VOCAB_SIZE + index, "content": f"<extra{index}>"} for index in range(extra)]
    document["added_tokens"] += added
    return json.dumps(document)


def made(vocab_size: int = VOCAB_SIZE, extra: int = 0) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer_json(extra), vocab_size, EOS_TOKEN_IDS)


def outputs(
    grammars: GrammarCompiler, grammar: Grammar, boosted: list[int], count: int = 1, **sampling_fields: Any
) -> list[tuple[list[int], Output]]:
    """Of an engine whose model chooses at random, mostly from `boosted`: all tokens, and the last output."""
    runner = RandomRunner(grammars.vocab_size, boosted)
    settings = EngineSettings(model="random", max_num_seqs=16)
    engine = Engine(settings, runner, EOS_TOKEN_IDS, 4096, "revision", grammars=grammars)
    tokens: dict[str, list[int]] = {str(seed): [] for seed in range(count)}
    last: dict[str, Output] = {}
    for seed in range(count):
        sampling = SamplingParams(**({"max_tokens": 300, "grammar": grammar} | sampling_fields))
        engine.add(Request(request_id=str(seed), prompt_token_ids=[1], sampling=sampling, noise_seed=seed))
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            last[output.request_id] = output
    return [(tokens[name], last[name]) for name in tokens]


@pytest.mark.parametrize(
    ("vocab_size", "extra"),
    [(VOCAB_SIZE, 1), (VOCAB_SIZE, 30), (VOCAB_SIZE, 700), (288, 0), (288, 30), (VOCAB_SIZE + 500, 0), (320, 61)],
)
def test_outputs_keep_to_their_grammar_when_the_tokenizer_has_more_or_fewer_tokens(vocab_size: int, extra: int) -> None:
    for made_tokens, output in outputs(made(vocab_size, extra), CLOSED, [], count=5):
        assert output.finish_reason == "stop", output.error
        text = bytes(token for token in made_tokens if token < 256)
        assert json.loads(text)["x"] in (1, 20)


def test_tokens_without_a_logit_are_never_allowed_by_a_grammar() -> None:
    """A thinking may have any token."""
    grammar = within_budget(60, ord(">"), None, ANSWER).build({})
    for made_tokens, output in outputs(made(extra=40), grammar, [], count=8):
        assert output.finish_reason == "stop", output.error
        assert max(made_tokens) < VOCAB_SIZE


@pytest.mark.parametrize("stops", [{}, {"stop_token_ids": [ord("s")]}])
def test_an_output_does_not_end_within_its_thinking_when_an_answer_must_follow(stops: dict[str, Any]) -> None:
    """The model would rather end at once: its logits of EOS, and of stop tokens, are by far the largest."""
    grammar = within_budget(20, ord(">"), None, ANSWER).build({})
    for made_tokens, output in outputs(made(), grammar, [*EOS_TOKEN_IDS, ord("s")], count=12, **stops):
        assert output.finish_reason == "stop", output.error
        end = made_tokens.index(ord(">"))
        assert end <= 20
        assert not set(made_tokens[:end]) & {*EOS_TOKEN_IDS, *stops.get("stop_token_ids", ())}
        assert json.loads(bytes(token for token in made_tokens[end + 1 :] if token < 256))["x"] in (1, 20)


def test_eos_is_not_allowed_when_a_clients_grammar_matches_any_token() -> None:
    grammar = Grammar(json.dumps({"grammars": [{"lark_grammar": 'start: <[*]>{5} "end"'}]}))
    for made_tokens, output in outputs(made(), grammar, [*EOS_TOKEN_IDS], count=6):
        assert output.finish_reason == "stop", output.error
        assert bytes(made_tokens[5:8]) == b"end"


def test_compiled_grammars_are_evicted_when_they_exceed_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles: list[str] = []
    compile_one = compiler_module._compiled
    monkeypatch.setattr(
        compiler_module, "_compiled", lambda tokenizer, text: compiles.append(text) or compile_one(tokenizer, text)
    )
    grammars, size = made(), MAX_KEPT_BYTES // 3
    large = [Grammar(of_regex(f"a{{{index + 1}}}").text, num_bytes=size) for index in range(6)]
    for grammar in [*large, *large[-3:]]:
        grammars.compile(grammar).result()
        assert grammars.kept_bytes <= MAX_KEPT_BYTES
    assert len(compiles) == 6, "those that fit are kept"
    grammars.compile(large[0]).result()
    assert len(compiles) == 7


def test_a_grammar_waits_when_those_in_flight_exceed_their_bytes() -> None:
    grammars, half = made(), MAX_RUNNING_BYTES // 2
    first, second, third = (Grammar(of_regex(f"b{{{index + 1}}}").text, num_bytes=half) for index in range(3))
    assert grammars.reserve(first)
    assert grammars.reserve(second)
    assert not grammars.reserve(third)
    assert grammars.reserve(first), "it shares what is there"
    grammars.release(first)
    assert not grammars.reserve(third), "another request has the same grammar"
    grammars.release(first)
    assert grammars.reserve(third)
    assert grammars.running_bytes == 2 * half


def test_a_grammar_has_its_place_when_it_is_alone_and_larger_than_the_bound() -> None:
    grammars = made()
    assert grammars.reserve(Grammar(of_regex("b").text, num_bytes=2 * MAX_RUNNING_BYTES))


def test_a_compiled_grammar_is_kept_when_a_request_in_flight_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles: list[str] = []
    compile_one = compiler_module._compiled
    monkeypatch.setattr(
        compiler_module, "_compiled", lambda tokenizer, text: compiles.append(text) or compile_one(tokenizer, text)
    )
    grammars = made()
    running, *others = (Grammar(of_regex(f"c{{{index + 1}}}").text, num_bytes=MAX_KEPT_BYTES) for index in range(4))
    assert grammars.reserve(running)
    for grammar in [running, *others, running]:
        grammars.compile(grammar).result()
    assert compiles.count(running.text) == 1
    assert grammars.kept_bytes <= MAX_KEPT_BYTES
    grammars.release(running)
    assert grammars.kept_bytes <= MAX_KEPT_BYTES


def test_fast_grammars_compile_when_slow_ones_occupy_their_thread() -> None:
    grammars = made()
    goes_on = threading.Event()
    blocked = [grammars._slow_thread.submit(goes_on.wait, 60) for _ in range(3)]
    slow = grammars.compile(Grammar(of_regex("b").text, cpu_s=0.5))
    try:
        matcher = grammars.compile(of_regex("a")).result(60)
        assert np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32)[3] == 1 << 1
        assert not slow.done()
    finally:
        goes_on.set()
    assert all(wait.result() for wait in blocked)
    slow.result(60)


_COMPILE_A_CHAIN = """
from mini_infer_engine.core.grammars.compiler import GrammarCompiler
from mini_infer_engine.dry.vocabulary import EOS_TOKEN_IDS, VOCAB_SIZE, dry_assets
from tests.support.hostile_grammars import LINKS, chain, unchecked

grammars = GrammarCompiler(lambda: dry_assets().files["tokenizer.json"], VOCAB_SIZE, EOS_TOKEN_IDS)
for link in LINKS.values():
    grammars.compile(unchecked(chain(link, 3000))).result()
print("alive")
"""


def test_the_process_survives_when_a_grammars_chain_overflows_an_8_mb_stack() -> None:
    """The checks refuse such chains; this is what is left if they miss one."""
    ended = subprocess.run([sys.executable, "-c", _COMPILE_A_CHAIN], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "alive\n"), ended.stderr[-2000:]
