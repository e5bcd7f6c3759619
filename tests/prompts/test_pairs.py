"""Texts and pairs of texts are tokenised and cut as transformers does."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from mini_infer_prompts.pairs import Cut, Side, longest_first, pair_ids, single_ids

WORDS = ["[UNK]", "[CLS]", "[SEP]", *"abcdefgh"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return made


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("most", [None, 12, 8, 7, 6, 4])
@pytest.mark.parametrize(("first", "second"), [("a b", "c d e f g"), ("c d e f g", "a b"), ("a b c d", "e f g h")])
def test_ids_equal_transformers_when_pairs_are_cut(
    tokenizer: Tokenizer, first: str, second: str, most: int | None, side: Side
) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer, truncation_side=side)
    cut = None if most is None else Cut(most, side)
    options = {} if most is None else {"truncation": True, "max_length": most}
    expected = reference(first, second, return_token_type_ids=True, **options)
    found = pair_ids(tokenizer, first, second, cut)
    assert found.ids == expected["input_ids"]
    assert found.type_start == expected["token_type_ids"].index(1)
    if cut is not None:
        assert single_ids(tokenizer, second, cut) == reference(second, **options)["input_ids"]


def test_no_special_tokens_are_added_when_none_are_requested(tokenizer: Tokenizer) -> None:
    assert pair_ids(tokenizer, "a b", "c", Cut(2, "right"), add_special_tokens=False).ids == [3, 5]
    assert pair_ids(tokenizer, "a", "b", None, add_special_tokens=False).ids == [3, 4]


@pytest.mark.parametrize(
    ("lengths", "most", "expected"),
    [((2, 3), 9, (2, 3)), ((2, 9), 6, (2, 4)), ((9, 2), 6, (4, 2)), ((9, 9), 5, (2, 3)), ((9, 8), 0, (0, 0))],
)
def test_the_longer_text_is_cut_first(lengths: tuple[int, int], most: int, expected: tuple[int, int]) -> None:
    assert longest_first(*lengths, most) == expected
