import asyncio
import threading
from collections.abc import Callable

import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from mini_infer_engine.dry.vocabulary import EOS_TOKEN_IDS, TURN_START_ID, dry_assets
from mini_infer_engine.model_path import DEMO_DIRECTORY
from mini_infer_engine.structured.grammar import Grammar, of_choice, of_regex
from mini_infer_engine.structured.limits import GrammarError
from mini_infer_engine.structured.params import GrammarRequest
from mini_infer_engine.structured.proving.messages import Proof
from mini_infer_engine.structured.proving.prover import Prover, ProverLostError
from mini_infer_engine.text import grammars
from mini_infer_engine.text.grammars import Grammars, special_tokens
from mini_infer_engine.text.validation import ParameterError
from mini_infer_web.api_errors import ApiError

TOKENIZER = Tokenizer.from_str(dry_assets().files["tokenizer.json"])


def request(build: Callable[[], Grammar]) -> GrammarRequest:
    return GrammarRequest("response_format", lambda special: build())


def test_a_grammar_is_built_with_special_tokens_and_its_parameter() -> None:
    seen = []
    requested = GrammarRequest("response_format", lambda special: seen.append(special) or of_choice(["a"]))
    assert Grammars(TOKENIZER).build(requested).param == "response_format"
    assert seen == [special_tokens(TOKENIZER)]
    assert sorted(seen[0].values()) == [TURN_START_ID, *EOS_TOKEN_IDS]


async def test_a_grammar_is_built_off_the_event_loop() -> None:
    threads: list[str] = []

    def build() -> Grammar:
        threads.append(threading.current_thread().name)
        return of_choice(["a"])

    await Grammars(TOKENIZER).build_in_thread(request(build))
    assert threads[0].startswith("grammar")


def _wrong() -> Grammar:
    raise GrammarError("the schema is odd")


@pytest.mark.parametrize(
    ("build", "message_part"), [(_wrong, "the schema is odd"), (lambda: of_regex("("), "unclosed group")]
)
async def test_grammar_errors_name_parameter_and_fault(build: Callable[[], Grammar], message_part: str) -> None:
    with pytest.raises(ParameterError, match=f"response_format (?s:.*){message_part}") as caught:
        await Grammars(TOKENIZER).build_in_thread(request(build))
    assert (caught.value.param, caught.value.code) == ("response_format", "invalid_grammar")


def test_a_grammar_is_refused_when_there_is_no_tokenizer() -> None:
    with pytest.raises(ParameterError, match="response_format needs a tokenizer"):
        Grammars(None).build(request(lambda: of_choice(["a"])))


async def test_a_grammar_is_refused_when_its_check_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "BUILD_TIMEOUT_S", 0.01)
    goes_on = threading.Event()

    def build() -> Grammar:
        goes_on.wait()
        return of_choice(["a"])

    try:
        with pytest.raises(ParameterError, match="takes longer than 0"):
            await Grammars(TOKENIZER).build_in_thread(request(build))
    finally:
        goes_on.set()


class _Workers:
    """In place of processes: proofs that wait until they may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: list[str] = []
        self.go_on = threading.Event()
        self.three_began = threading.Event()
        monkeypatch.setattr(Prover, "prove", lambda prover, text: self.prove(text))

    def prove(self, text: str) -> Proof:
        self.texts.append(text)
        if len(self.texts) == 3:
            self.three_began.set()
        self.go_on.wait(60)
        return Proof()


def _one_of(text: str) -> GrammarRequest:
    return request(lambda: of_choice([text]))


async def test_grammars_of_one_client_do_not_delay_other_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, checks = _Workers(monkeypatch), Grammars(TOKENIZER)
    greedy = [asyncio.create_task(checks.build_in_thread(_one_of(f"g{index}"), "greedy")) for index in range(10)]
    other = asyncio.create_task(checks.build_in_thread(_one_of("other"), "other"))
    try:
        assert await asyncio.to_thread(workers.three_began.wait, 60)
        assert [text for text in workers.texts if "other" in text]
        assert len(workers.texts) == 1 + grammars.MAX_GRAMMARS_PER_CLIENT
    finally:
        workers.go_on.set()
    await asyncio.gather(*greedy, other)
    assert len(workers.texts) == 11


async def test_a_client_gets_retry_after_when_it_has_too_many_new_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_GRAMMARS_WAITING", 1)
    workers, checks = _Workers(monkeypatch), Grammars(TOKENIZER)
    tasks = [asyncio.create_task(checks.build_in_thread(_one_of(f"g{index}"), "greedy")) for index in range(4)]
    done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=60)
    workers.go_on.set()
    await asyncio.gather(*waiting)
    (refused,) = done
    error = refused.exception()
    assert isinstance(error, ApiError)
    assert (error.status, error.code) == (429, "too_many_grammars")
    await checks.build_in_thread(_one_of("later"), "greedy")


async def test_a_grammar_is_never_compiled_again_when_it_ended_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    proved: list[str] = []
    monkeypatch.setattr(Prover, "prove", lambda prover, text: proved.append(text) or Proof(fault="it is too much"))
    checks = Grammars(TOKENIZER)
    for _ in range(3):
        with pytest.raises(ParameterError, match="response_format") as caught:
            await checks.build_in_thread(_one_of("a"))
        assert caught.value.code == "invalid_grammar"
    assert len(proved) == 1


async def test_a_grammar_is_checked_again_when_its_check_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [ProverLostError("it was ended"), Proof()]

    def prove(prover: Prover, text: str) -> Proof:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(Prover, "prove", prove)
    checks = Grammars(TOKENIZER)
    with pytest.raises(ApiError) as caught:
        await checks.build_in_thread(_one_of("a"))
    assert (caught.value.status, caught.value.code) == (503, "grammar_check_lost")
    await checks.build_in_thread(_one_of("a"))


def test_special_tokens_equal_those_of_llguidance() -> None:
    """`<tool_call>` and `<think>` are added tokens of the demo model and many others, and not special."""
    text = (DEMO_DIRECTORY / "tokenizer.json").read_text()
    tokenizer = Tokenizer.from_str(text)
    theirs = LLTokenizer(text, n_vocab=tokenizer.get_vocab_size(), eos_token=[0])
    added = tokenizer.get_added_tokens_decoder()
    assert set(special_tokens(tokenizer).values()) == {
        token_id for token_id in added if theirs.is_special_token(token_id)
    }
