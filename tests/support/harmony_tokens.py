"""A vocabulary with harmony's special tokens: a token a byte, as the dry run's, and a token for each marker."""

import json
import re
from functools import cache

from llguidance import LLMatcher, LLTokenizer

from mini_infer_engine.dry.vocabulary import dry_assets
from mini_infer_engine.parsing.harmony import MARKERS
from mini_infer_engine.structured.grammar import Grammar
from mini_infer_prompts.prompt import PromptAssets

FIRST_ID = 256
IDS = {marker: FIRST_ID + index for index, marker in enumerate((*MARKERS, "<|endoftext|>"))}
EOS_IDS = [IDS[text] for text in ("<|return|>", "<|call|>", "<|endoftext|>")]
VOCAB_SIZE = FIRST_ID + len(IDS)


def harmony_files(chat_template: str | None = None) -> PromptAssets:
    files = dict(dry_assets().files)
    tokenizer = json.loads(files["tokenizer.json"])
    [example] = [added for added in tokenizer["added_tokens"] if added["content"] == "<|endoftext|>"]
    tokenizer["added_tokens"] = [example | {"id": number, "content": text} for text, number in IDS.items()]
    config = {"eos_token": "<|return|>"} | ({} if chat_template is None else {"chat_template": chat_template})
    files |= {"tokenizer.json": json.dumps(tokenizer), "tokenizer_config.json": json.dumps(config)}
    return PromptAssets.from_files(files)


def token_ids(text: str) -> list[int]:
    """Returns markers as one token each, and all other text as its bytes."""
    pieces = re.split("(" + "|".join(map(re.escape, IDS)) + ")", text)
    return [number for piece in pieces for number in ([IDS[piece]] if piece in IDS else piece.encode())]


@cache
def _tokenizer() -> LLTokenizer:
    return LLTokenizer(harmony_files().files["tokenizer.json"], n_vocab=VOCAB_SIZE, eos_token=EOS_IDS)


def accepts(grammar: Grammar, tokens: list[int]) -> bool:
    """The whole output, not only as a beginning."""
    matcher = LLMatcher(_tokenizer(), grammar.text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
