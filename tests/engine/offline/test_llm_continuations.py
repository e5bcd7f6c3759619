"""Texts of a SentencePiece model that go on after a prompt: what transformers decodes of both less the prompt."""

from pathlib import Path

import pytest

from mini_infer_engine import LLM, SamplingParams, StructuredOutputsParams
from tests.engine.text.test_detokenizer import LLAMA_LIKE
from tests.support.tiny_models import save_tiny_model

PROMPT = "a\n  b"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = tmp_path_factory.mktemp("sentencepiece")
    save_tiny_model(folder, "llama", vocab_size=LLAMA_LIKE.get_vocab_size())
    LLAMA_LIKE.save(str(folder / "tokenizer.json"))
    return LLM(str(folder), device="cpu", kv_cache_memory=2**22)


def biased(*pieces: str, **sampling_params: object) -> SamplingParams:
    """Greedy, of these tokens alone."""
    allowed = [LLAMA_LIKE.token_to_id(piece) for piece in pieces]
    return SamplingParams(temperature=0, max_tokens=6, allowed_token_ids=allowed, ignore_eos=True, **sampling_params)


@pytest.mark.parametrize("pieces", [("▁a", "▁b"), ("▁a",), ("▁",), ("<0xE4>", "<0xB8>", "<0xAD>", "▁b"), ("é", "▁a")])
def test_text_is_the_whole_less_the_prompt_when_an_output_begins_with_a_space(
    pieces: tuple[str, ...], llm: LLM
) -> None:
    [output] = llm.generate(PROMPT, biased(*pieces), use_tqdm=False)
    made = output.outputs[0]
    ids = list(output.prompt_token_ids)
    whole, before = LLAMA_LIKE.decode([*ids, *made.token_ids]), LLAMA_LIKE.decode(ids)
    assert before == PROMPT
    assert made.text == whole[len(before) :]


def test_a_stop_string_with_its_space_ends_the_text_when_it_comes_first(llm: LLM) -> None:
    [output] = llm.generate(PROMPT, biased("▁a", stop=[" a"]), use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("", " a")


def test_tokens_have_their_space_when_log_probabilities_are_requested(llm: LLM) -> None:
    [output] = llm.generate(PROMPT, biased("▁a", logprobs=0), use_tqdm=False)
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    assert [one.decoded_token for position in logprobs for one in position.values()] == [" a"] * 6


def test_a_pattern_matches_the_text_when_it_begins_with_a_space(llm: LLM) -> None:
    sampling_params = SamplingParams(
        temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(regex=" [ab]{3}")
    )
    [output] = llm.generate(PROMPT, sampling_params, use_tqdm=False)
    assert output.outputs[0].text[0] == " "
    assert len(output.outputs[0].text) == 4
