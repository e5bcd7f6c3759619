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
from mini_infer_engine.text import grammars
from mini_infer_engine.text.grammars import Grammars, special_tokens
from mini_infer_engine.text.validation import ParameterError

TOKENIZER = Tokenizer.from_str(dry_assets().files["tokenizer.json"])


def request(build: Callable[[], Grammar]) -> GrammarRequest:
    return GrammarRequest("response_format", lambda special: build())


def test_a_grammar_is_built_with_the_special_tokens_and_knows_its_field() -> None:
    seen = []
    asked = GrammarRequest("response_format", lambda special: seen.append(special) or of_choice(["a"]))
    assert Grammars(TOKENIZER).build(asked).param == "response_format"
    assert seen == [special_tokens(TOKENIZER)]
    assert sorted(seen[0].values()) == [TURN_START_ID, *EOS_TOKEN_IDS]


async def test_it_is_built_off_the_event_loop() -> None:
    threads: list[str] = []

    def build() -> Grammar:
        threads.append(threading.current_thread().name)
        return of_choice(["a"])

    await Grammars(TOKENIZER).build_in_thread(request(build))
    assert threads[0].startswith("grammar")


def _wrong() -> Grammar:
    raise GrammarError("the schema is odd")


@pytest.mark.parametrize(("build", "said"), [(_wrong, "the schema is odd"), (lambda: of_regex("("), "unclosed group")])
async def test_errors_name_the_field_and_the_fault(build: Callable[[], Grammar], said: str) -> None:
    with pytest.raises(ParameterError, match=f"response_format cannot be enforced: (?s:.*){said}") as caught:
        await Grammars(TOKENIZER).build_in_thread(request(build))
    assert (caught.value.param, caught.value.code) == ("response_format", "invalid_grammar")


def test_without_a_tokenizer_there_are_no_grammars() -> None:
    with pytest.raises(ParameterError, match="response_format needs a tokenizer"):
        Grammars(None).build(request(lambda: of_choice(["a"])))


async def test_what_takes_too_long_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_special_tokens_are_those_that_llguidance_takes_for_no_text() -> None:
    """`<tool_call>` and `<think>` are added tokens of the demo model and many others, and not special."""
    text = (DEMO_DIRECTORY / "tokenizer.json").read_text()
    tokenizer = Tokenizer.from_str(text)
    theirs = LLTokenizer(text, n_vocab=tokenizer.get_vocab_size(), eos_token=[0])
    added = tokenizer.get_added_tokens_decoder()
    assert set(special_tokens(tokenizer).values()) == {
        token_id for token_id in added if theirs.is_special_token(token_id)
    }
